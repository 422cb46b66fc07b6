"""Engines to audit: transformers' assisted generation, a completions server, a function."""

from __future__ import annotations

import json
import pkgutil
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput
from draftproof.verify.audit import Draw, Law, Text
from draftproof.verify.statistics import Array

ROWS = 64
"""Texts per forward, and per request to a server."""


class ModelLaw:
    """A model's distribution under a sampling: `law(texts)` is [n, V], texts of one length.

    prompt: tokens of the prompt, behind which some penalties begin.
    """

    def __init__(self, model: PreTrainedModel, sampling: Sampling, prompt: int = 0) -> None:
        self.model, self.params = model, SamplingParams(sampling, prompt)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Text]) -> Array:
        ids = torch.tensor(texts, device=self.model.device)                             # [n, L]
        probs = torch.cat([self._some(part) for part in torch.split(ids, ROWS)])
        return np.asarray(probs.cpu().numpy())

    def _some(self, ids: torch.Tensor) -> torch.Tensor:
        read = self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        place = torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
        paths = Paths(Prefix(ids, place), TokenTree.root(ids[:, -1]))
        sampler = Sampler([self.params] * len(ids), ids.device)
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
        ids = len(self.first)
        return lambda texts: np.stack([
            np.bincount(self.first, weights=row[:ids], minlength=len(row)) for row in law(texts)
        ])

    def id(self, string: str) -> int:
        if string.startswith("token_id:"):
            return int(self.first[int(string.removeprefix("token_id:"))])
        if string not in self.ids:
            raise BadInput(f"the server's token {string!r} is unknown to the reference's tokenizer")
        return self.ids[string]


class Endpoint:
    """Any server with OpenAI's POST /v1/completions. Prompts go as token ids."""

    def __init__(
        self, url: str, model: str, want: Sampling, length: int, words: Vocabulary
    ) -> None:
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
                raise BadInput(f"{self.url} gave no choices; is it a completions server?")
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
        except (OSError, ValueError) as error:
            why = f"cannot be reached or gave no JSON ({getattr(error, 'reason', error)})"
            raise BadInput(f"{self.url} {why}; is a completions server running?") from error
        return answer if isinstance(answer, dict) else {}

    def _tokens(self, choice: dict[str, Any]) -> list[int]:
        """Token ids of a choice: as given, by the strings of its log-probabilities, or by text."""
        ids, scores = choice.get("token_ids"), choice.get("logprobs") or {}
        if isinstance(ids, list) and ids:
            return [int(self.words.first[token]) for token in ids]
        strings = scores.get("tokens") or [entry["token"] for entry in scores.get("content") or []]
        if not strings and self.length > 1 and choice.get("text"):
            why = "neither token ids nor logprobs: only one token can be judged; add --length 1"
            raise BadInput(f"{self.url} returns {why}")
        return [self.words.id(string) for string in strings or [choice.get("text")] if string]


def from_module(name: str) -> Any:
    """The sampler behind ``module:attribute``; modules of the working directory are found."""
    if not all(name.partition(":")):
        raise BadInput(f"python was {name!r}; give module:attribute, such as my_engine:sample")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"{name} cannot be imported: {error}") from error
    if not callable(getattr(found, "sample", found)):
        kind = type(found).__name__
        raise BadInput(f"{name} is a {kind}; it must be a function sample(prompt, n, seed)")
    return found
