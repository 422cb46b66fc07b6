"""Makes an engine from options, and describes it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.cli import show
from draftproof.engine.config import EngineConfig
from draftproof.errors import BadInput, DraftproofError, ModelNotFound, RankLost
from draftproof.requests.openai_format import NOT_DATA

if TYPE_CHECKING:
    from draftproof.core.params import Sampling
    from draftproof.engine.engine import Engine
    from draftproof.model.parallel import ProcessGroup


def config_of(model: str, options: dict[str, Any], bf16: bool) -> EngineConfig:
    """The engine's options, with dtype and device from --bf16 and --use-hpu-graphs."""
    dtype = options.get("dtype", "bfloat16")
    if bf16 and dtype not in ("bfloat16", "bf16"):
        raise BadInput(f"both --bf16 and --dtype {dtype} were given; leave one of them out")
    graphs = {"device": "hpu"} if options.get("graphs") else {}
    return EngineConfig(model, **{**graphs, **options, **({"dtype": dtype} if bf16 else {})})


def engine_of(config: EngineConfig) -> Engine:
    """Load and check all parts of an engine, which lives as long as the process."""
    gc.disable()                # imports and vocabularies make a million objects without garbage
    try:
        with show.loading("starting PyTorch"):
            from draftproof.engine.load import build

            return build(config)
    finally:
        _stop_packing()
        gc.freeze()             # searching all of it for garbage takes a quarter of a second
        gc.enable()


def start_pytorch(config: EngineConfig, sampling: dict[str, Any], *, loads: bool = True) -> None:
    """Import PyTorch, and check the sampling options before a model is loaded.

    Args:
        config: The options of the engine.
        sampling: The sampling options.
        loads: Whether this process will load the model.

    Raises:
        BadInput: No model could honour one of the options.
        ModelNotFound: The model is a damaged GGUF file.
    """
    with show.loading("starting PyTorch"):
        if loads:
            _pack_ahead(config)
        from draftproof.core.params import Sampling

        try:
            Sampling(**sampling)
        except BadInput:
            _stop_packing()
            raise


def _pack_ahead(config: EngineConfig) -> None:
    """Begin to pack a GGUF file that runs in its own format, unless PyTorch is there already."""
    model = config.model
    unpacked = config.dtype or config.quantize or config.parallel or config.compile or config.graphs
    if "torch" in sys.modules or unpacked or config.device not in (None, "cpu"):
        return
    if not isinstance(model, (str, Path)) or Path(model).suffix.lower() != ".gguf":
        return                                          # the reader of headers imports NumPy
    from draftproof.gguf.header import is_gguf
    from draftproof.weights import pack_ahead

    if is_gguf(model):
        pack_ahead.start(model)


def _stop_packing() -> None:
    if "draftproof.weights.pack_ahead" in sys.modules:
        from draftproof.weights import pack_ahead

        pack_ahead.stop()


def alone_engine(config: EngineConfig, command: str, cache: int) -> Engine:
    """An engine of one process that caches beginnings of prompts in at most `cache` bytes."""
    from draftproof.engine.prefix_cache import PrefixCache

    if config.parallel is not None:
        raise BadInput(f"{command} runs in one process; leave --parallel out")
    engine = engine_of(config)
    engine.prefixes = PrefixCache(cache) if cache else None
    return engine


def must_decode_alone(engine: Engine, command: str) -> Engine:
    """Return the engine; refuse a model with an encoder, which not all commands support."""
    if engine.target.is_encoder_decoder:
        raise BadInput(
            f"{engine.target.name} is an encoder-decoder, which {command} does not support; "
            "run, serve and bench do"
        )
    return engine


@contextmanager
def main_process_only(config: EngineConfig) -> Iterator[ProcessGroup]:
    """A block in which only rank 0 prints, so that messages appear once."""
    from draftproof.model.parallel import form_group

    group = form_group(config.parallel)
    if group.is_main_process:
        yield group
        return
    with (Path(os.devnull).open("w", encoding="utf-8") as devnull,
          redirect_stdout(devnull), redirect_stderr(devnull)):
        try:
            yield group
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except DraftproofError as error:
            if isinstance(error, (RankLost, ModelNotFound)):        # perhaps this rank's alone
                raise
            raise SystemExit(1) from None


def must_have_folders(*files: Path | None) -> None:
    """Refuse files that could not be written at the end, before the work."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise BadInput(f"there is no folder {file.absolute().parent}; make it first")


def described(config: EngineConfig, engine: Engine, wanted: Sampling) -> dict[str, object]:
    """The settings of a text for JSON: the options, the choices made, and the sampling."""
    target, sampling = engine.target, vars(wanted).items()
    return {
        **config.explicit_options(),
        "drafter": engine.drafter.name, "draft_tokens": engine.budget.max_draft_tokens,
        "budget": type(engine.budget).__name__.lower(), "acceptance": engine.acceptance,
        "quantised": lost(engine), "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device), "ranks": target.group.size,
        "sampling": {name: value for name, value in sampling if name not in NOT_DATA},
    }  # fmt: skip


def lost(engine: Engine) -> list[str]:
    """Lines on the cost and savings of quantising; none if nothing was quantised."""
    target, (kept, plain) = engine.target, engine.target.position_bytes
    lines = [str(target.quantization)] if target.quantization is not None else []
    if target.kv_cache:
        lines.append(f"{target.kv_cache} KV cache: {kept} bytes per token, in place of {plain}")
    return lines
