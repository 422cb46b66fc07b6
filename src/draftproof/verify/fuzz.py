"""Section "fuzz": random models, prompts, drafters, batches, sampling, cancelled runs and threads.

Every row must have the text that plain decoding writes for it alone. A round is a function of its
seed, so that failures can be repeated.
"""

from __future__ import annotations

import logging
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.requests.completion import Completion
from draftproof.requests.prompts import Prompt
from draftproof.verify.report import Section, Tick, silent

T = TypeVar("T")
FREE: dict[str, dict[str, Any]] = {
    "portfolio": {}, "suffix": {"drafter": "suffix", "budget": 3},
    "recycling": {"drafter": "recycling"}, "prompt lookup": {"drafter": "prompt-lookup"},
}
"""Drafters that any model has, and how they are loaded."""
EMBEDDED: dict[str, dict[str, Any]] = {
    **FREE, "draft model": {"assistant_model": "demo-draft"},
    "draft tree": {"assistant_model": "demo-draft", "draft_tree": "3,2,1"},
    "medusa": {"drafter": "medusa"}, "redrafter": {"drafter": "redrafter"},
}
"""Drafters of the embedded model."""
PER_MODEL = 12
"""Rounds before another model is made; every second model is the embedded one."""
OPENINGS = ("Once upon a time", "Tom and his dog were playing. Tom and his dog", "a", "\n\n",
            "1 2 3 4 5 6", "The cat 🐈 said “méow”", "Lily saw a big red ball. Lily saw a big red")
STOPS = (".", "\n", " the", "and then", "<|endoftext|>", ".<|endoftext|>", "🐈", "e", "zzz",
         " a big")  # fmt: skip
WORDS = ("the", " was", "!", [5], [264, 300], "happy", "Once upon")
REQUEST_SIZES = (1, 2, 5, 11)


class Wanted(NamedTuple):
    """A prompt with the options of its completion."""

    prompt: Prompt
    sampling: Sampling


class Difference(AssertionError):
    """A row whose text differs from plain decoding of it alone."""


def shift_odd(text: Tensor, scores: Tensor) -> Tensor:
    """A user's processor that depends on the text."""
    scores = scores.clone()
    scores[:, 1::2] += 1.5 * (text[:, -1:] % 2)
    return scores


def requests(dice: random.Random, count: int, vocab: int = 4096) -> list[Wanted]:
    """Make random requests, with most options off most of the time."""

    def rarely(usual: T, *others: T) -> T:
        return dice.choice(others) if dice.random() < 0.2 else usual

    made = []
    for _ in range(count):
        prompt: Prompt = dice.choice(OPENINGS)
        if dice.random() < 0.3:
            prompt = [dice.randrange(vocab) for _ in range(dice.choice((1, 3, 20, 70)))]
        tokens = dice.sample(range(vocab), 3)
        sampling = Sampling(
            temperature=dice.choice((0, 0.3, 0.7, 1.0, 1.6)), top_k=rarely(0, 1, 5, 50, 9999),
            top_p=rarely(1.0, 0.95, 0.5, 0.01), min_p=rarely(0.0, 0.05, 1.0),
            repetition_penalty=rarely(1.0, 1.3, 0.8), presence_penalty=rarely(0.0, 0.7, -0.5),
            frequency_penalty=rarely(0.0, 0.7, -0.5), no_repeat_ngram=rarely(0, 1, 2, 4),
            logit_bias=rarely({}, {tokens[0]: 9.0, tokens[1]: -9.0}, {0: -1e9}),
            banned_words=rarely((), dice.sample(WORDS, 2)), min_new_tokens=rarely(0, 3, 30),
            stop=rarely((), dice.sample(STOPS, 2), STOPS), stop_tokens=rarely(None, (), tokens),
            seed=dice.choice((0, 1, -7, 2**31, 2**70, dice.randrange(2**64))),
            logprobs=rarely(False, True), processors=rarely((), (shift_odd,)),
            max_new_tokens=dice.choice((1, 2, 7, 24, 50)),
        )
        made.append(Wanted(prompt, sampling))
    return made


class Fuzzer:
    """Engines with one target, and plain decoding for comparison.

    Args:
        model: The target.
        drafters: The options of each engine, by its name in reports.
        options: Options on which the target's results depend: dtype, quantize.
    """

    def __init__(
        self, model: str = "demo", drafters: dict[str, dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.plain = load(model, drafter="none", **options)
        self.rows, loaded = 0, self.plain.target.model
        tokenizer = self.plain.codec and self.plain.codec.tokenizer
        self.engines = {
            name: load(loaded, tokenizer=tokenizer, **drafter)
            for name, drafter in (EMBEDDED if drafters is None else drafters).items()
        }

    def round(self, seed: int) -> None:
        """Run random requests in a random way.

        Raises:
            Difference: A row has another text, or an error.
        """
        dice = random.Random(seed)
        name = dice.choice(list(self.engines))
        engine, ways = self.engines[name], (self._batch, self._stream, self._cancel, self._threads)
        way = dice.choice((self._batch, *ways))
        wanted = requests(dice, dice.choice(REQUEST_SIZES), self.plain.target.vocab_size)
        try:
            way(dice, engine, wanted)
        except (Difference, BadInput, IndexError, RuntimeError) as error:
            raise Difference(f"round {seed}, {name}, {way.__name__}: {error!r}") from error

    def _batch(self, dice: random.Random, engine: Engine, wanted: Sequence[Wanted]) -> None:
        """Run requests in a batch, with several samples each."""
        n, size = dice.choice((1, 1, 2, 3)), dice.choice((None, 1, 2, 4, 16))
        prompts, samplings = zip(*wanted, strict=True)
        for done in engine.generate(list(prompts), sampling=samplings, n=n, batch_size=size):
            self._compare(wanted[done.prompt], done)

    def _stream(self, dice: random.Random, engine: Engine, wanted: Sequence[Wanted]) -> None:
        """Run several streams in turn on one engine."""
        streams = [self._chunks(engine, request) for request in wanted]
        while streams:
            stream = dice.choice(streams)
            if next(stream, None) is None:
                streams.remove(stream)

    def _chunks(self, engine: Engine, request: Wanted) -> Iterator[str]:
        text = ""
        for chunk in engine.stream(request.prompt, sampling=request.sampling):
            text += chunk.text
            yield chunk.text
            if chunk.completion is not None:
                self._compare(request, chunk.completion)
                if text != chunk.completion.text:
                    raise Difference(f"chunks {text!r}, completion {chunk.completion.text!r}")

    def _cancel(self, dice: random.Random, engine: Engine, wanted: Sequence[Wanted]) -> None:
        """Abandon runs half way, and start others after them."""
        prompts, samplings = [list(column) for column in zip(*wanted, strict=True)]
        queued = engine.read(prompts, sampling=samplings)
        left = engine.new_scheduler(dice.choice((1, 3, 8)), interleave=dice.random() < 0.5)
        for request in queued:
            left.add(request)
        for _ in range(dice.randrange(12)):
            left.step()
            if dice.random() < 0.2:
                left.abort(dice.choice(queued))
        if dice.random() < 0.5:
            left.close()
        running = engine.as_completed(prompts, sampling=samplings)
        few = range(dice.randrange(1, len(wanted) + 1))
        for _, completion in zip(few, running, strict=False):
            self._compare(wanted[completion.prompt], completion)
        self._batch(dice, engine, wanted[:2])

    def _threads(self, dice: random.Random, engine: Engine, wanted: Sequence[Wanted]) -> None:
        """Run two threads on one engine."""
        parts = [(random.Random(dice.random()), part) for part in (wanted, wanted[::-1])]
        with ThreadPoolExecutor(2) as pool:
            for run in [pool.submit(self._batch, rolls, engine, part) for rolls, part in parts]:
                run.result()

    def _compare(self, request: Wanted, drafted: Completion) -> None:
        alone = self.plain.generate([request.prompt], sampling=request.sampling,
                                    n=drafted.sample + 1, batch_size=1)[drafted.sample]
        self.rows += 1
        here, there = ((done.text, done.tokens, done.finish_reason, len(done.logprobs or ()))
                       for done in (drafted, alone))
        if here != there:
            raise Difference(f"{request}, sample {drafted.sample}: {here}, plain decoding {there}")


def random_model(folder: Path, seed: int) -> Path:
    """Save a small random model with the embedded model's tokenizer; the seed determines its
    family, sizes and weights."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from draftproof.model.loading import embedded, load_tokenizer

    dice, path = random.Random(seed), folder / f"model-{seed}"
    heads, width = dice.choice((2, 4)), dice.choice((32, 64))
    options: dict[str, object] = {
        "hidden_size": heads * width, "intermediate_size": dice.choice((96, 128, 192)),
        "num_hidden_layers": dice.choice((1, 2, 3)), "num_attention_heads": heads,
        "num_key_value_heads": dice.choice((1, heads)), "max_position_embeddings": 512,
        "tie_word_embeddings": dice.random() < 0.5, "initializer_range": 0.1, "head_dim": width,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
        "vocab_size": AutoConfig.from_pretrained(embedded("demo")).vocab_size,
    }
    family = dice.choice(("llama", "qwen2", "qwen3", "gemma3_text", "mistral"))
    if family == "gemma3_text":
        options |= {"sliding_window": 80, "query_pre_attn_scalar": width}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    weights = {name: weight.bfloat16().contiguous() for name, weight in model.state_dict().items()
               if not (options["tie_word_embeddings"] and name == "lm_head.weight")}
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.bfloat16
    model.config.save_pretrained(path)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer: Any = load_tokenizer(embedded("demo"))
    tokenizer.save_pretrained(path)
    return path


def prove_fuzz(
    model: str, minutes: float, tick: Tick = silent, *, seed: int = 0, **options: Any
) -> Section:
    """Run random rounds for this many minutes, but at least one; passes if no row differs.

    Args:
        model: "demo" alternates between the embedded model and small random ones; other models are
            fuzzed alone, with drafters that fit any model.
        minutes: The duration.
        tick: Receives the progress.
        seed: The seed of the first round; later ones count up from it.
        **options: Options of the target, as in `load`: dtype, quantize, device.
    """
    start, number, rows, models = time.monotonic(), 0, 0, 0
    failures, fuzzer, current = list[str](), None, -1
    flags = "".join(f" --{name} {value}" for name, value in options.items() if value)
    with tempfile.TemporaryDirectory() as folder, _without_notes():
        while not number or time.monotonic() - start < 60 * minutes:
            which = (seed + number) // PER_MODEL if model == "demo" else 0
            if fuzzer is None or which != current:
                rows += fuzzer.rows if fuzzer else 0
                fuzzer = _fuzzer(model, which, Path(folder), options)
                current, models = which, models + 1
            share = (time.monotonic() - start) / max(60 * minutes, 1)
            tick(min(share, 1.0), f"round {number}")
            try:
                fuzzer.round(seed + number)
            except Difference as error:
                repeat = f"draftproof prove {model} --fuzz 0 --seed {seed + number}{flags}"
                failures.append(f"{error}; repeat it with: {repeat}")
            number += 1
    rows += fuzzer.rows if fuzzer is not None else 0
    verdict = (f"{rows} rows of {number} random rounds on {models} models compared with plain "
               f"decoding, {len(failures)} rounds differ")
    return Section("fuzz", verdict, {"rows": rows, "rounds": number, "models": models,
                                     "seed": seed, "minutes": minutes, **options}, failures)


@contextmanager
def _without_notes() -> Iterator[None]:
    """Suppress notes on random requests, which are of no use."""
    log = logging.getLogger("draftproof")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _fuzzer(model: str, which: int, folder: Path, options: dict[str, Any]) -> Fuzzer:
    """The fuzzer of a round."""
    if model != "demo":
        return Fuzzer(model, FREE, **options)
    if which % 2 == 0:
        return Fuzzer("demo", EMBEDDED, **options)
    small = str(random_model(folder, which))
    helper = str(random_model(folder, which + 1_000_000))
    tree = {"assistant_model": helper, "draft_tree": "2,2,1"}
    return Fuzzer(small, {**FREE, "draft model": {"assistant_model": helper}, "draft tree": tree},
                  **options)
