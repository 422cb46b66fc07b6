"""The methods to measure: engines with the same target and one drafter each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftproof.bench.measure import PLAIN, OurEngine
from draftproof.engine.config import TRAINING_FREE
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.engine.named_drafters import HEADS, default_name
from draftproof.errors import BadInput


def load_methods(
    model: str, drafters: Sequence[str], assistants: Sequence[str], **options: Any
) -> tuple[Engine, list[OurEngine]]:
    """Load plain decoding, and each drafter and draft model, or the default, for the same target.

    options: of `load`. Also returns the plain engine. Raises BadInput for names that do not fit.
    """
    names = [*drafters, *assistants]
    if len(set(names)) < len(names):
        raise BadInput(f"{max(names, key=names.count)} was given twice; once is enough")
    light = [name for name in drafters if set(name.split("+")) <= {*TRAINING_FREE, *HEADS}]
    if options.get("quantize_draft") is not None and light == names:
        raise BadInput("--quantize-draft is for draft models, and none was named; leave it out")
    plain_options: dict[str, Any] = {name: options.get(name)
                           for name in ("dtype", "device", "quantize", "kv_cache")}
    plain = load(model, drafter="none", **plain_options)
    methods = [OurEngine(PLAIN, plain)]
    for name in names or [default_name(plain.target)]:
        method_options = options | {"assistant_model" if name in assistants else "drafter": name}
        method_options |= {"quantize_draft": None} if name in light else {}
        source: Any = model                             # it drafts with the original weights
        if not name.startswith("self-") or plain_options["quantize"] is None:
            source, method_options["quantize"] = plain.target.model, None
        engine = load(source, tokenizer=plain.codec and plain.codec.tokenizer, **method_options)
        methods.append(OurEngine(name, engine))
    return plain, methods
