"""`draftproof audit`: a server, a function, exit codes; errors are one sentence each."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import transformers
from random_models import save_model

from draftproof.core.params import Sampling
from draftproof.verify.audit import Text, model_distribution


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo's tokenizer, sharp enough for a small sample."""
    return save_model(tmp_path_factory.mktemp("served"), layers=1, spread=0.8)


Call = Callable[..., Any]


class Server(NamedTuple):
    url: str
    sins: set[str]
    asked: list[dict[str, Any]]


@pytest.fixture(scope="module")
def server(served: Path) -> Iterator[Server]:
    """A right completions server; what is in `sins` makes it wrong, or right in another way."""
    model = transformers.LlamaForCausalLM.from_pretrained(served).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(served)
    sins: set[str] = set()
    asked: list[dict[str, Any]] = []

    @cache
    def row(text: Text, temperature: float) -> Any:
        return model_distribution(model, Sampling(temperature=temperature))([text])[0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(ask)
            code = 404 if ask["model"] != "tiny" else 200
            if "unknown options refused" in sins and {"top_k", "min_p"} & ask.keys():
                code = 400
            output = {"choices": self.choices(ask)} if code == 200 else {"error": "refused"}
            answer = json.dumps(output).encode()
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
                    probs = row((*ask["prompt"], *text), temperature)
                    if "truncates by default" in sins:
                        least = ask.get("min_p", 0.05) * probs.max()
                        most = 3 if ask.get("top_k", 3) == 3 else len(probs)
                        likely = np.argsort(probs)[::-1][:most]
                        kept = np.where(probs >= least, probs, 0)
                        probs = np.zeros_like(probs)
                        probs[likely] = kept[likely]
                    text.append(int(dice.choice(len(probs), p=probs / probs.sum())))
                strings = [tokenizer.decode([token]) for token in text]
                scores = None if "no logprobs" in sins else {"tokens": strings}
                choices.append({"text": "".join(strings), "logprobs": scores})
            return choices

        def log_message(self, *output: Any) -> None:
            """Say nothing."""

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield Server(f"http://127.0.0.1:{httpd.server_port}", sins, asked)
    httpd.shutdown()


@pytest.mark.parametrize(
    ("sin", "code"), [
        ("", 0), ("constant seed", 1), ("temperature ignored", 1),
        ("truncates by default", 0), ("unknown options refused", 0),
    ]
)
def test_a_server(
    server: Server, served: Path, call: Call, tmp_path: Path, sin: str, code: int
) -> None:
    server.sins.clear()
    server.sins.add(sin)
    report = tmp_path / "audit.json"
    answer = call(
        "audit", "--endpoint", server.url, "--model", "tiny", "--reference", str(served),
        "--prompt", "Once", "--temperature", "0.6", "--samples", "2000", "--json", str(report),
    )  # fmt: skip
    assert answer.code == code and answer.out.startswith("BIASED" if code else "UNBIASED"), answer
    figures = json.loads(report.read_text())
    assert figures["verdict"] == ("biased" if code else "unbiased") and figures["samples"] == 2000
    assert all(check["control"] for check in figures["checks"])


def test_each_request_to_a_server_has_another_seed(
    server: Server, served: Path, call: Call
) -> None:
    """With one seed for several, a right server repeats itself."""
    server.sins.clear()
    server.asked.clear()
    call("audit", "--endpoint", server.url, "--model", "tiny", "--reference", str(served),
         "--prompt", "Once", "--samples", "300")  # fmt: skip
    seeds = [ask["seed"] for ask in server.asked if ask["n"] > 1]
    assert len(set(seeds)) == len(seeds) > 3


def test_a_server_without_logprobs_is_judged_by_one_token(
    server: Server, served: Path, call: Call
) -> None:
    server.sins.clear()
    server.sins.add("no logprobs")
    ask = ("audit", "--endpoint", server.url, "--model", "tiny", "--reference", str(served))
    ask += ("--prompt", "Once", "--samples", "1000")
    answer = call(*ask)
    assert answer.code == 2 and "--length 1" in answer.err
    assert call(*ask, "--length", "1").code == 0


def test_the_command_line_with_a_function(
    served: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "def sample(prompt, n, seed):\n    return [[7, 7]] * n\n"
    (tmp_path / "my_engine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    out = call("audit", "--python", "my_engine:sample", "--model", str(served), "--samples", "999")
    assert out.code == 1 and out.out.startswith("BIASED")
    (tmp_path / "broken_engine.py").write_text("def sample(*given):\n    raise ValueError('boom')")
    out = call("audit", "--python", "broken_engine:sample", "--model", str(served))
    assert out.code == 2 and "boom" in out.err, "1 always means biased"


NOBODY = ("--endpoint", "http://127.0.0.1:9")
FUNCTION = ("--python", "builtins:len", "--model", "SERVED")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "one engine"),
        (["--hf", "demo"], "--assistant-model"),
        (["--hf", "demo", "--assistant-model", "demo-draft", "--length", "0"], "length was 0"),
        (["--hf", "demo", "--assistant-model", "x", "--num-assistant-tokens", "0"], "at least 1"),
        (["--hf", "demo", "--assistant-model", "x", "--reference", "demo"], "leave it out"),
        ([*FUNCTION, "--num-assistant-tokens", "5"], "leave it out"),
        ([*NOBODY, "--model", "x"], "--reference"),
        ([*NOBODY, "--model", "x", "--reference", "SERVED"], "cannot be reached"),
        (["--endpoint", "127.0.0.1", "--model", "x", "--reference", "SERVED"], "http://"),
        (["--endpoint", "SERVER", "--model", "x", "--reference", "SERVED"], "404"),
        (["--python", "no_such_module:f", "--model", "SERVED"], "no_such_module"),
        (["--python", "json", "--model", "SERVED"], "module:function"),
        ([*FUNCTION, "--samples", "3"], "200"),
        ([*FUNCTION, "--temperature", "-1"], "temperature"),
        (["--hf", "/no/where", "--assistant-model", "x"], "/no/where"),
    ],
)
def test_usage_errors_are_one_sentence_with_exit_code_2(
    call: Call, served: Path, server: Server, options: list[str], words: str
) -> None:
    server.sins.clear()
    known = {"SERVED": str(served), "SERVER": server.url}
    answer = call("audit", *(known.get(option, option) for option in options))
    lines = answer.err.splitlines()
    assert answer.code == 2 and answer.out == "" and words in answer.err, answer
    assert len(lines) == 1 and lines[0].startswith("draftproof: ")
