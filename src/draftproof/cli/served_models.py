"""The models of ``draftproof serve``: their names, and how to load them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from draftproof.cli.setup import alone_engine, config_of
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.engine.engine import Engine
    from draftproof.model.adapters import MergedAdapter
    from draftproof.server.models import Source

ONLY_FIRST = ("assistant_model", "tokenizer")
"""Options of the first model; further models are loaded without them."""


def sources_of(
    model: str, name: str | None, also: Sequence[str], adapters: Sequence[str],
    options: dict[str, object], bf16: bool, cache: int,
) -> dict[str, Source]:
    """Sources of models by clients' names; the first is for clients that name none.

    Args:
        model: A model, or a folder of models.
        name: Its name for clients.
        also: Further models, each MODEL or NAME=MODEL.
        adapters: LoRA adapters of the model, each FOLDER or NAME=FOLDER.
        options: The engines' options from the command line.
        bf16: Whether --bf16 was given.
        cache: The bytes for beginnings of prompts, per model.

    Raises:
        BadInput: Two have the same name, or an adapter is not valid.
    """
    from draftproof.model.adapters import MergedAdapter, models_in, weight_bytes
    from draftproof.server.models import Source

    first, *others = [*map(str, models_in(Path(model)))] or [model]
    if others and (name or adapters):
        raise BadInput(f"{model} is a folder of models; --served-model-name and --lora need one "
                       "model")
    pairs = [(name or _name_of(first), first), *((_name_of(other), other) for other in others),
             *map(_named, also)]
    sources = dict[str, Source]()
    for place, (called, path) in enumerate(pairs):
        fitting = {option: value for option, value in options.items()
                   if place == 0 or option not in ONLY_FIRST}
        config = config_of(path, fitting, bf16)
        _put(sources, called, Source(partial(alone_engine, config, "serve", cache),
                                   weight_bytes(path)))
    for called, folder in map(_named, adapters):
        merged = MergedAdapter(first, Path(folder))
        load = partial(_adapted, merged, {"tokenizer": first, **options}, bf16, cache)
        _put(sources, called, Source(load, merged.size, pairs[0][0]))
    return sources


def _adapted(merged: MergedAdapter, options: dict[str, object], bf16: bool, cache: int) -> Engine:
    return alone_engine(config_of(str(merged.folder()), options, bf16), "serve", cache)


def _put(sources: dict[str, Source], name: str, source: Source) -> None:
    if name in sources:
        raise BadInput(f"two models are called {name!r}; rename one of them: NAME={name}")
    sources[name] = source


def _named(argument: str) -> tuple[str, str]:
    """Parse a name and a path from NAME=PATH or a path."""
    name, equals, path = argument.partition("=")
    if equals and name and path and not Path(argument).exists():
        return name, path
    return _name_of(argument), argument


def _name_of(model: str) -> str:
    return Path(model).name.removesuffix(".gguf")
