"""From options to an engine and a sampling. Knows the library's entry points; checks what only the command line can ask."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.drafters.medusa_trees import CHOICES, DYNAMIC
from draftproof.errors import BadInput, DraftproofError, ModelNotFound, RankLost

if TYPE_CHECKING:
    from draftproof.core.params import Sampling
    from draftproof.core.tree import TreeShape
    from draftproof.core.typical import Typical
    from draftproof.engine.engine import Engine
    from draftproof.engine.shape_policy import ShapePolicy
    from draftproof.model.process_group import ProcessGroup

MOST_NODES = 1024
"""Draft tokens per round beyond which a tree is a typing error."""


MODELLESS = ("none", "portfolio", "prompt-lookup", "suffix", "recycling")
"""Drafters without a model or heads of their own."""


def all_among(names: Sequence[str], drafter: str | None) -> bool:
    """Whether a drafter, or each of several that are merged, is one of these; the default is the portfolio."""
    return all(part in names for part in (drafter or "portfolio").split("+"))


@dataclass(frozen=True)
class Setup:
    """What the options say about the engine. None leaves it to the library."""

    model: str
    assistant_model: str | None = None
    drafter: str | None = None
    num_assistant_tokens: int | None = None
    draft_tree: str | None = None
    acceptance: str | None = None
    dtype: str | None = None
    device: str | None = None
    lossy: str | None = None
    quantize: str | None = None
    quantize_draft: str | None = None
    kv_cache: str | None = None
    parallel: str | None = None
    graphs: bool = False
    bucket: int | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        """Refuse before a model is loaded what can be refused before."""
        if self.assistant_model is not None and self.drafter is not None:
            raise BadInput("both --assistant-model and --drafter were given; give one of them")
        if self.num_assistant_tokens is not None and self.num_assistant_tokens < 1:
            raise BadInput(
                f"num_assistant_tokens was {self.num_assistant_tokens}; draft at least 1 token, "
                "or use --drafter none for plain decoding"
            )
        modelless = self.assistant_model is None and all_among(MODELLESS, self.drafter)
        if self.draft_tree is not None and modelless:
            raise BadInput(
                "--draft-tree is for draft models and Medusa heads; name one with --assistant-model or --drafter"
            )
        if not self._tree_is_named:
            branching(self.draft_tree or "1")
        if self.lossy is not None and self.acceptance is not None:
            raise BadInput(f"both --lossy and --acceptance {self.acceptance} were given; leave one of them out")
        thresholds(self.lossy or "typical")
        if self.bucket is not None and self.bucket < 1:
            raise BadInput(f"--bucket-size was {self.bucket}; give at least 1, or leave it out")
        if self.quantize_draft and modelless:
            raise BadInput("--quantize-draft is for draft models; name one with --assistant-model or --drafter")

    def engine(self) -> Engine:
        """Load everything and check it against each other. What is there then stays as long as the process does."""
        from draftproof.engine.load import load

        engine = load(
            self.model,
            assistant_model=self.assistant_model,
            drafter=self.drafter,
            dtype=self.dtype,
            device=self.device,
            acceptance=self.acceptance or "match",
            lossy=self._typical(),
            budget=self.num_assistant_tokens,
            draft_tree=self._shape(),
            quantize=self.quantize,
            quantize_draft=self.quantize_draft,
            kv_cache=self.kv_cache,
            parallel=self.parallel,
            graphs=self.graphs,
            shapes=self._shapes(),
            compile=self.compile,
        )
        gc.freeze()                                     # to look through all of it for garbage takes a quarter of a second
        return engine

    def _shapes(self) -> ShapePolicy | None:
        from draftproof.engine.shape_policy import ShapePolicy

        return ShapePolicy(closed=True, bucket=self.bucket) if self.bucket is not None or self.graphs else None

    def group(self) -> ProcessGroup:
        """The processes that run the target together; this one alone, if nobody said so."""
        from draftproof.model.process_group import ALONE, form_group
        from draftproof.model.tensor_parallel import check_engine

        if self.parallel is None:
            return ALONE
        check_engine(self.parallel)
        return form_group()

    @contextmanager
    def one_voice(self) -> Iterator[ProcessGroup]:
        """Only rank 0 speaks inside: what every rank would say is said once."""
        group = self.group()
        if group.leads:
            yield group
            return
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            try:
                yield group
            except KeyboardInterrupt:
                raise SystemExit(130) from None
            except DraftproofError as error:
                if isinstance(error, (RankLost, ModelNotFound)):        # these may be this rank's alone
                    raise
                raise SystemExit(1) from None

    @property
    def _tree_is_named(self) -> bool:
        return self.draft_tree == DYNAMIC or self.draft_tree in CHOICES

    def _shape(self) -> TreeShape | str | None:
        from draftproof.core.tree import TreeShape

        if self._tree_is_named:
            return self.draft_tree
        return TreeShape.branching(branching(self.draft_tree)) if self.draft_tree is not None else None

    def _typical(self) -> Typical | bool:
        from draftproof.core.typical import Typical

        return Typical(*thresholds(self.lossy)) if self.lossy is not None else False


def branching(text: str) -> tuple[int, ...]:
    """Children per node, level by level, from "3,2,1"."""
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = ()
    if not widths or min(widths) < 1:
        raise BadInput(
            f"draft_tree was {text!r}; give children per node, level by level, such as 3,2,1, or a published tree, "
            f"such as {next(iter(CHOICES))}"
        )
    nodes = sum(prod(widths[:depth]) for depth in range(1, len(widths) + 1)) if len(widths) < MOST_NODES else MOST_NODES
    if nodes >= MOST_NODES:
        raise BadInput(f"draft_tree {text!r} drafts {nodes} tokens or more per round; stay below {MOST_NODES}")
    return widths


def thresholds(text: str) -> tuple[float, ...]:
    """Epsilon and delta from "typical:0.09,0.3"; none from "typical" alone, which takes the defaults."""
    name, given, numbers = text.partition(":")
    try:
        values = tuple(float(part) for part in numbers.split(",")) if given else ()
    except ValueError:
        values = (0.0,)
    if name != "typical" or len(values) not in (0, 2):
        raise BadInput(f"lossy was {text!r}; give typical, or typical:EPSILON,DELTA such as typical:0.09,0.3")
    return values


def as_on_gaudi(dtype: str | None, device: str | None, bf16: bool, graphs: bool) -> tuple[str | None, str | None]:
    """Dtype and device, where --bf16 and --use-hpu-graphs say so too."""
    if bf16 and dtype not in (None, "bfloat16", "bf16"):
        raise BadInput(f"both --bf16 and --dtype {dtype} were given; leave one of them out")
    return "bfloat16" if bf16 else dtype, "hpu" if graphs and device is None else device


def plain_beside(engine: Engine) -> Engine:
    """Plain decoding with the same target and defaults; nothing is loaded twice."""
    from draftproof.drafters.plain import Plain
    from draftproof.engine.engine import Engine

    return Engine(engine.target, Plain(), codec=engine.codec, sampling=engine.sampling, stop_tokens=engine.stop_tokens)


def sampling(base: Sampling, given: Mapping[str, Any]) -> Sampling:
    """`base` with what was asked for; None and empty lists ask for nothing."""
    from dataclasses import replace

    return replace(base, **{name: value for name, value in given.items() if value is not None and value != []})


def described(setup: Setup, engine: Engine, wanted: Sampling) -> dict[str, Any]:
    """The settings a text came from, for JSON: what was asked, what was chosen, and the sampling in full."""
    from dataclasses import asdict

    return {
        "model": engine.target.name if setup.model == engine.target.name else setup.model,
        "drafter": engine.drafter.name,
        "assistant_model": setup.assistant_model,
        "draft_tokens": engine.budget.most,
        "budget": type(engine.budget).__name__.lower(),
        "draft_tree": setup.draft_tree,
        "acceptance": engine.acceptance,
        **({"lossy": asdict(engine.lossy)} if engine.lossy is not None else {}),
        **quantised(engine),
        "dtype": str(engine.target.dtype).removeprefix("torch."),
        "device": str(engine.target.device),
        **({"parallel": setup.parallel, "ranks": engine.target.group.size} if setup.parallel is not None else {}),
        "sampling": {name: value for name, value in asdict(wanted).items() if name != "processors"},
    }


def quantised(engine: Engine) -> dict[str, Any]:
    """What was quantised, and what it cost and saved; nothing if nothing was."""
    target = engine.target
    told = {"quantize": target.quantization._asdict()} if target.quantization is not None else {}
    kept, plain = target.position_bytes
    return told | ({"kv_cache": {"kind": target.kv_cache, "bytes_per_token": kept, "plain": plain}} if target.kv_cache else {})


def lost(engine: Engine) -> list[str]:
    """What quantising cost and saved, in lines; none if nothing was quantised."""
    target, (kept, plain) = engine.target, engine.target.position_bytes
    cache = [f"{target.kv_cache} KV cache: {kept} bytes per token, in place of {plain}"] if target.kv_cache else []
    return [*([str(target.quantization)] if target.quantization is not None else []), *cache]


def as_chat(text: str) -> list[dict[str, str]]:
    """A prompt as the user's message."""
    if not text:
        raise BadInput("the prompt is empty; give at least one word")
    return [{"role": "user", "content": text}]
