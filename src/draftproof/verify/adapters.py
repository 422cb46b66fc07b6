"""Adapters: what `audit` needs of other people's engines. Knows transformers, HTTP and modules; knows nothing of tests.

`ModelLaw` is the known law, `Assisted` transformers' own assisted generation, `Endpoint` an OpenAI-compatible server,
`from_module` the user's own function. `tiny_pair` makes the smallest models that show what transformers does.
"""

from __future__ import annotations

import importlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model.loading import load_model
from draftproof.verify.audit import Setting
from draftproof.verify.bug_catalog import Array
from draftproof.verify.bug_match import Drafting
from draftproof.verify.outcomes import Law, Text
from draftproof.verify.outcomes import Sampler as Engine

ROWS = 64
"""Texts per forward of the reference model, and samples per request to a server."""


class ModelLaw:
    """A model's law under a sampling: `law(texts)` is [n, V], behind texts of one length."""

    def __init__(self, model: PreTrainedModel, sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Text]) -> Array:
        ids = torch.tensor(texts, device=self.model.device)                             # [n, L]
        parts = [self._some(ids[start : start + ROWS]) for start in range(0, len(ids), ROWS)]
        rows: Array = torch.cat(parts).cpu().numpy()
        return rows

    def _some(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, -1:].double()
        place = torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
        paths = Paths(Prefix(ids, place), TokenTree.root(ids[:, -1]))
        return Sampler([SamplingParams(self.sampling, ids.shape[1])] * len(ids), ids.device).probs(logits, paths)[:, 0]

    def under(self, **changes: Any) -> ModelLaw:
        """The same model with another sampling."""
        return ModelLaw(self.model, replace(self.sampling, **changes))


def mistaken_laws(law: ModelLaw) -> dict[str, Law]:
    """Whole laws by the name of the bug that makes them, where they differ from the right one."""
    wanted = law.sampling
    found: dict[str, Law] = {}
    if wanted.temperature not in (0, 1):
        found["temperature ignored"] = law.under(temperature=1.0)
        found["temperature applied twice"] = law.under(temperature=wanted.temperature**2)
        found["temperature upside down"] = law.under(temperature=1 / wanted.temperature)
    if wanted.temperature > 0:
        found["always the likeliest token: greedy instead of sampling"] = law.under(temperature=0.0)
    if wanted.temperature > 0 and (wanted.top_k or wanted.top_p < 1 or wanted.min_p):
        found["top-k, top-p and min-p ignored"] = law.under(top_k=0, top_p=1.0, min_p=0.0)
        found["temperature, top-k, top-p and min-p ignored"] = law.under(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    if wanted.temperature == 0:
        found["sampled instead of greedy"] = law.under(temperature=1.0)
    return found


def simpler_settings(law: ModelLaw, engine: Callable[[Sampling], Engine]) -> list[Setting]:
    """Greedy, then temperature 1, then the wanted temperature, where that is simpler than what was asked."""
    wanted = law.sampling
    bare = replace(wanted, top_k=0, top_p=1.0, min_p=0.0)
    steps = {"greedy": replace(bare, temperature=0.0), "temperature 1": replace(bare, temperature=1.0), named(bare): bare}
    return [Setting(name, engine(step), ModelLaw(law.model, step)) for name, step in steps.items() if step != wanted]


def named(sampling: Sampling) -> str:
    """A sampling in words."""
    if sampling.temperature == 0:
        return "greedy"
    filters = {"top-k": sampling.top_k, "top-p": sampling.top_p % 1, "min-p": sampling.min_p}            # 0 is off
    return ", ".join(f"{name} {value:g}" for name, value in {"temperature": sampling.temperature, **filters}.items() if value)


# transformers' assisted generation -----------------------------------------------------------------------------


class Assisted:
    """``generate(assistant_model=...)`` of the installed transformers, one row at a time as it demands."""

    def __init__(
        self, model: PreTrainedModel, assistant: PreTrainedModel, sampling: Sampling, length: int, tokens: int | None = None,
        ends: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.model, self.assistant = model, assistant
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        drawn |= {"min_p": sampling.min_p} if sampling.min_p else {}
        self.config = GenerationConfig(
            do_sample=sampling.temperature > 0, **(drawn if sampling.temperature > 0 else {}), max_new_tokens=length,
            eos_token_id=list(ends) or None, pad_token_id=ends[0] if ends else 0,
        )  # fmt: skip
        self.tokens = tokens

    def __call__(self, prompt: list[int], n: int, seed: int) -> list[list[int]]:
        """`n` texts, one after the other behind one ``torch.manual_seed``."""
        torch.manual_seed(seed)
        ids = torch.tensor([prompt], device=self.model.device)
        with _own_settings(self.model, self.assistant, self.tokens):
            return [self._one(ids) for _ in range(n)]

    def _one(self, ids: torch.Tensor) -> list[int]:
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=self.config, assistant_model=self.assistant
        )
        new: list[int] = out[0, ids.shape[1] :].tolist()
        return new


class SinglePosition:
    """The law that a Gemma-4 assistant's logits stand for, by transformers' own candidate generator. It drafts their argmax."""

    def __init__(self, model: PreTrainedModel, assistant: PreTrainedModel) -> None:
        self.model, self.assistant = model, assistant

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Text]) -> Array:
        return np.stack([self._behind(text) for text in texts])

    def _behind(self, text: Text) -> Array:
        from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

        if len(text) == 1:                                      # round one drafts nothing: there is no law to know
            size = int(self.model.config.get_text_config().vocab_size)
            return np.full(size, 1 / size)
        ids = torch.tensor([text], device=self.model.device)
        mask = torch.ones_like(ids)
        config = GenerationConfig(max_length=len(text) + 3)
        drafter = SinglePositionMultiTokenCandidateGenerator(self.assistant, self.model.get_input_embeddings(), config)
        drafter.num_assistant_tokens = 1
        read = self.model(ids[:, :-1], attention_mask=mask[:, :-1], **drafter.model_kwargs_overrides)
        _, logits = drafter.get_candidates(ids, {"attention_mask": mask}, read, is_first_iteration=False, n_last_matches=0)
        law: Array = logits[0, 0].double().softmax(-1).cpu().numpy()
        return law


def is_single_position(assistant: PreTrainedModel) -> bool:
    """Whether transformers drafts with it from one position, as it does with Gemma 4's assistants: told by its class."""
    return type(assistant).__name__.startswith(("Gemma4Assistant", "Gemma4UnifiedAssistant"))


def assistant_drafting(model: PreTrainedModel, assistant: PreTrainedModel, sampling: Sampling, tokens: int | None) -> Drafting:
    """What is known of the drafts of an assistant, for the search of the bug."""
    if is_single_position(assistant):
        return Drafting(SinglePosition(model, assistant), tokens=1)
    law = ModelLaw(assistant, sampling if sampling.temperature > 0 else Sampling(temperature=1.0))
    return Drafting(law, ModelLaw(assistant, Sampling(temperature=1.0)), tokens)


def load_assistant(name: str, dtype: str | None = None, device: str | None = None) -> PreTrainedModel:
    """As `load_model`; Gemma 4's assistants too, which transformers 5.23 cannot build by itself."""
    with _mended_sharing():
        return load_model(name, dtype, device)


class Pair(NamedTuple):
    """A target and its assistant."""

    model: PreTrainedModel
    assistant: PreTrainedModel


STYLES = ("draft-model", "gemma4")


def tiny_pair(style: str, vocab: int = 6, seed: int = 9) -> Pair:
    """Random models of one layer or a few, sharp enough that a bias shows: enough to examine the installed transformers."""
    shape = {
        "vocab_size": vocab, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.4,
    }  # fmt: skip
    torch.manual_seed(seed)
    if style == "draft-model":
        llama = transformers.LlamaConfig(**shape, num_hidden_layers=1)
        pair = Pair(transformers.LlamaForCausalLM(llama), transformers.LlamaForCausalLM(llama))
    elif style == "gemma4":
        pair = _gemma_pair(shape)
    else:
        raise BadInput(f"there is no style {style!r}; choose one of {', '.join(STYLES)}")
    for model in pair:
        model.eval().generation_config = GenerationConfig()
    return pair


def _gemma_pair(shape: dict[str, Any]) -> Pair:
    names = ("Gemma4TextConfig", "Gemma4ForCausalLM", "Gemma4AssistantConfig", "Gemma4AssistantForCausalLM")
    missing = [name for name in names if not hasattr(transformers, name)]
    if missing:
        raise UnsupportedModel(
            f"transformers {transformers.__version__} has no {missing[0]}, so it has no single-position assistant to audit; "
            "install a newer one, such as 5.23"
        )
    layers = {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32,
        "head_dim": 8, "global_head_dim": 8,
    }  # fmt: skip
    inputs = {"vocab_size_per_layer_input": shape["vocab_size"], "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 2}
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**shape, **layers, **inputs))
    bare = {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 4}
    with _mended_sharing():
        text = transformers.Gemma4TextConfig(**shape, **layers, **bare)
        config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=shape["hidden_size"])
        return Pair(model, transformers.Gemma4AssistantForCausalLM(config))


@contextmanager
def _mended_sharing() -> Iterator[None]:
    """Let assistants be built. In 5.23.0 `kv_sharing_modes` raises if all layers reuse the target's keys, as theirs must."""
    configs = [getattr(transformers, name, None) for name in ("Gemma4TextConfig", "Gemma4UnifiedTextConfig")]
    broken = [config for config in configs if config is not None and "kv_sharing_modes" in vars(config)]
    before = [(config, vars(config)["kv_sharing_modes"]) for config in broken]

    def mended(own: Any) -> property:
        def modes(config: Any) -> Any:
            shared = config.num_kv_shared_layers >= config.num_hidden_layers
            return ["reuse"] * config.num_hidden_layers if shared else own.fget(config)

        return property(modes)

    try:
        for config, own in before:
            config.kv_sharing_modes = mended(own)
        yield
    finally:
        for config, own in before:
            config.kv_sharing_modes = own


@contextmanager
def _own_settings(model: PreTrainedModel, assistant: PreTrainedModel, tokens: int | None) -> Iterator[None]:
    """No default of either checkpoint's generation_config but the assistant's draft length; put back afterwards."""
    before = model.generation_config, assistant.generation_config
    model.generation_config = GenerationConfig()
    fixed = {"num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant"} if tokens else {}
    assistant.generation_config = GenerationConfig(**fixed)
    try:
        yield
    finally:
        model.generation_config, assistant.generation_config = before


# A server ------------------------------------------------------------------------------------------------------


class Vocabulary:
    """Token ids of the strings a server names them by. Ids with the same string count as one, the first of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        strings = [tokenizer.decode([token]) for token in range(size)]
        self.ids: dict[str, int] = {}
        self.first = np.array([self.ids.setdefault(string, token) for token, string in enumerate(strings)])
        for token, string in enumerate(tokenizer.convert_ids_to_tokens(list(range(size)))):
            if isinstance(string, str):
                self.ids.setdefault(string, int(self.first[token]))
        counts = np.bincount(self.first, minlength=size)
        self.shared = frozenset(np.flatnonzero(counts > 1).tolist())

    def merged(self, law: Law) -> Law:
        """`law` with the ids of one string put together."""

        def rows(texts: Sequence[Text]) -> Array:
            return np.stack([np.bincount(self.first, weights=row[: len(self.first)], minlength=len(row)) for row in law(texts)])

        return rows

    def id(self, string: str) -> int:
        if string.startswith("token_id:"):
            return int(self.first[int(string.removeprefix("token_id:"))])
        if string not in self.ids:
            raise BadInput(f"the server returned the token {string!r}, which the reference model's tokenizer does not have")
        return self.ids[string]


class Endpoint:
    """Any server with OpenAI's POST /v1/completions. Prompts go as token ids; tokens come back by ids or log-probabilities."""

    def __init__(
        self, url: str, model: str, sampling: Sampling, length: int, vocabulary: Vocabulary, timeout: float = 60.0
    ) -> None:
        base = url.rstrip("/")
        if not base.startswith(("http://", "https://")):
            raise BadInput(f"endpoint was {url!r}; give an address such as http://127.0.0.1:8000")
        tail = "" if base.endswith("/completions") else "/completions" if base.endswith("/v1") else "/v1/completions"
        self.url, self.model, self.timeout = base + tail, model, timeout
        self.sampling, self.length, self.vocabulary = sampling, length, vocabulary

    def __call__(self, prompt: list[int], n: int, seed: int) -> list[list[int]]:
        """`n` texts, in as many requests as the server needs, each with its own seed."""
        texts: list[list[int]] = []
        requests = 0
        while len(texts) < n:
            came = self._request(prompt, min(ROWS, n - len(texts)), (seed * 1009 + requests) % 2**31)
            texts += came[: n - len(texts)]
            requests += 1
        return texts

    def _request(self, prompt: list[int], n: int, seed: int) -> list[list[int]]:
        want = self.sampling
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": self.length, "n": n, "seed": seed,
            "temperature": want.temperature, "top_p": want.top_p, "logprobs": 1,
        }  # fmt: skip
        body |= {name: value for name, value in {"top_k": want.top_k, "min_p": want.min_p}.items() if value}
        choices = self._post(body).get("choices")
        if not isinstance(choices, list) or not choices:
            raise BadInput(f"{self.url} answered without any choices; it is no OpenAI-compatible completions server")
        return [self._tokens(choice) for choice in choices]

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(300).decode(errors="replace").split())
            raise BadInput(f"{self.url} answered {error.code}: {said or error.reason}") from error
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise BadInput(f"{self.url} cannot be reached ({reason}); is the server running?") from error
        except ValueError as error:
            raise BadInput(f"{self.url} answered with no JSON; is it an OpenAI-compatible server?") from error
        return answer if isinstance(answer, dict) else {}

    def _tokens(self, choice: dict[str, Any]) -> list[int]:
        """Token ids of a choice: as given, by the strings of its log-probabilities, or, for one token, by its text."""
        ids, scores = choice.get("token_ids"), choice.get("logprobs") or {}
        if isinstance(ids, list) and ids:
            return [int(self.vocabulary.first[token]) for token in ids]
        strings = scores.get("tokens") or [entry["token"] for entry in scores.get("content") or []]
        if not strings and self.length > 1 and choice.get("text"):
            raise BadInput(
                f"{self.url} returns neither token ids nor logprobs, so only one token can be told apart; add --length 1, "
                "which sees no bug that begins at the second token"
            )
        return [self.vocabulary.id(string) for string in strings or [choice.get("text")] if string]


# The user's own ------------------------------------------------------------------------------------------------


def from_module(name: str) -> Engine:
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
        raise BadInput(f"there is no module {error.name}; run where it can be imported, or install it") from error
    except AttributeError as error:
        raise BadInput(f"module {module} has no {attribute}") from error
    if not callable(getattr(found, "sample", found)):
        raise BadInput(f"{name} is a {type(found).__name__}; it must be a function sample(prompt, n, seed) or have that method")
    return found                                                                        # type: ignore[no-any-return]
