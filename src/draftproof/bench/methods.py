"""The methods that are measured: engines with the same target and one drafter each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftproof.bench.inflate import load_inflated
from draftproof.bench.measure import PLAIN, OurEngine
from draftproof.engine.config import TRAINING_FREE
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.engine.named_drafters import HEADS, default_name
from draftproof.errors import BadInput
from draftproof.model.packed_linear import pack_linears


def load_methods(
    model: str, drafters: Sequence[str], assistants: Sequence[str], inflate: str | None = None,
    **options: Any,
) -> tuple[Engine, list[OurEngine]]:
    """Plain decoding, and each drafter and draft model, or the default, around the same target.

    options: of `load`. Returns the plain engine, too. Raises BadInput for names that do not fit.
    """
    names = [*drafters, *assistants]
    if len(set(names)) < len(names):
        raise BadInput(f"{max(names, key=names.count)} was given twice; once is enough")
    light = [name for name in drafters if set(name.split("+")) <= {*TRAINING_FREE, *HEADS}]
    if options.get("quantize_draft") is not None and light == names:
        raise BadInput("--quantize-draft is for draft models, and none was named; leave it out")
    where: dict[str, Any] = {name: options.get(name) for name in ("dtype", "device")}
    own = where | {name: options.get(name) for name in ("quantize", "kv_cache")}
    source: Any = load_inflated(model, inflate, **where) if inflate is not None else model
    if inflate is not None and own["quantize"] is None:
        pack_linears(source)
    plain = load(source, drafter="none", **own)
    methods = [OurEngine(PLAIN, plain)]
    for name in names or [default_name(plain.target)]:
        asked = options | {"assistant_model" if name in assistants else "drafter": name}
        asked |= {"quantize_draft": None} if name in light else {}
        if name.startswith("self-") and own["quantize"] is not None:    # drafts by the original
            source = load_inflated(model, inflate, **where)
        else:
            source, asked["quantize"] = plain.target.model, None
        engine = load(source, tokenizer=plain.codec and plain.codec.tokenizer, **asked)
        methods.append(OurEngine(name, engine))
    return plain, methods
