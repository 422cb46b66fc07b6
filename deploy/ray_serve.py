"""Several replicas behind one address, on one machine or many, with Ray Serve:

    pip install '.[server]' 'ray[serve]'
    DRAFTPROOF_MODEL=demo DRAFTPROOF_REPLICAS=2 serve run deploy.ray_serve:app

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

MODEL = os.environ.get("DRAFTPROOF_MODEL", "demo")
ASSISTANT = os.environ.get("DRAFTPROOF_ASSISTANT") or None
ROWS = 8


def application() -> FastAPI:
    """Made in each replica, where the model is loaded."""
    engine = dp.load(MODEL, assistant_model=ASSISTANT)
    engine.prefixes = PrefixCache(512 << 20)
    return Server(engine, Path(MODEL).name, rows=ROWS).app()


@serve.deployment(
    num_replicas=int(os.environ.get("DRAFTPROOF_REPLICAS", "2")),
    max_ongoing_requests=4 * ROWS,
    ray_actor_options={"num_cpus": float(os.environ.get("DRAFTPROOF_CPUS", "1"))},
)
@serve.ingress(application)
class Replica:
    """Nothing of its own."""


app = Replica.bind()
