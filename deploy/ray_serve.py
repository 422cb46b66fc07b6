"""Several replicas behind one address, on one machine or many, with Ray Serve:

    pip install '.[server]' 'ray[serve]'
    DRAFTPROOF_MODEL=demo DRAFTPROOF_REPLICAS=2 serve run deploy.ray_serve:app

in the root of a clone. Further options are variables, too: DRAFTPROOF_ASSISTANT,
DRAFTPROOF_DRAFTER, DRAFTPROOF_QUANTIZE, DRAFTPROOF_DTYPE, DRAFTPROOF_MAX_BATCH,
DRAFTPROOF_MAX_MODEL_LEN, DRAFTPROOF_TIMEOUT, DRAFTPROOF_API_KEY, DRAFTPROOF_ALLOWED_ORIGINS (with
commas between them).

The API is at http://127.0.0.1:8000/v1; a replica is a process with the whole model. /metrics tells
of the replica that answers: for all, let Prometheus ask each, or use Ray's own metrics.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI
from ray import serve

import draftproof as dp
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.server.api import Server
from draftproof.server.guard import Access


def _variable(name: str) -> str | None:
    """An option; None if it is not set, or empty."""
    return os.environ.get(f"DRAFTPROOF_{name}") or None


MODEL = _variable("MODEL") or "demo"
ROWS = int(_variable("MAX_BATCH") or 8)
LOADED = ("assistant_model", "drafter", "quantize", "dtype")
"""Options of the model; the others are the server's."""


def application() -> FastAPI:
    """Made in each replica, where the model is loaded."""
    names = {"assistant_model": "ASSISTANT"}
    options = {name: _variable(names.get(name, name.upper())) for name in LOADED}
    engine = dp.load(MODEL, **{name: value for name, value in options.items() if value})
    engine.prefixes = PrefixCache(512 << 20)
    key, origins, timeout = _variable("API_KEY"), _variable("ALLOWED_ORIGINS"), _variable("TIMEOUT")
    if os.environ.get("DRAFTPROOF_API_KEY") == "":
        raise dp.BadInput("DRAFTPROOF_API_KEY was empty, which would let everybody in; unset it")
    access = Access([key] if key else [], None, origins.split(",") if origins else [])
    length = int(_variable("MAX_MODEL_LEN") or 4096)
    server = Server(engine, Path(MODEL).name, rows=ROWS, length=length, access=access,
                    timeout=float(timeout) if timeout else None)
    return server.app()


@serve.deployment(
    num_replicas=int(_variable("REPLICAS") or 2),
    max_ongoing_requests=4 * ROWS,
    ray_actor_options={"num_cpus": float(_variable("CPUS") or 1)},
)
@serve.ingress(application)
class Replica:
    """Nothing of its own."""


app = Replica.bind()
