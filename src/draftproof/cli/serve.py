"""``draftproof serve``: an OpenAI-compatible server."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.setup import alone_engine, config_of
from draftproof.errors import BadInput


def _option(text: str | None = None, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="Server", **more)


Host = Annotated[str, _option("Address to listen at; 0.0.0.0 for all.")]
Port = Annotated[int, _option(min=0, max=65535)]
MaxBatch = Annotated[int, _option("Rows that run at a time.", min=1, metavar="B")]
MaxQueue = Annotated[int, _option("Requests that may wait; more get 429.", min=1, metavar="N")]
MaxLength = Annotated[int, _option("Tokens of a prompt and its answer.", min=2, metavar="N")]
Timeout = Annotated[float | None, _option("Seconds that a request may take.", min=0, metavar="S")]
Key = Annotated[str | None, _option("Clients must send it.", envvar="DRAFTPROOF_API_KEY")]
Name = Annotated[str | None, _option("What clients call the model.", metavar="NAME")]
Prefixes = Annotated[int, _option("Memory for beginnings of prompts.", min=0, metavar="MiB")]
Price = Annotated[float | None, _option("Of this machine; gives cost per token.", min=0)]


@opt.with_options(engine=None)
def serve(
    model: opt.Model, host: Host = "127.0.0.1", port: Port = 8000, max_batch: MaxBatch = 8,
    max_queue: MaxQueue = 256, max_model_len: MaxLength = 4096, timeout: Timeout = None,
    api_key: Key = None, served_model_name: Name = None, price_per_hour: Price = None,
    prefix_cache: Prefixes = 512, bf16: opt.Bf16 = False, *, engine: dict[str, Any],
) -> None:  # fmt: skip
    """Serve a model over OpenAI's API, in batches, with a page at / to try it."""
    try:
        import uvicorn

        from draftproof.server.api import Server
    except ImportError as error:
        raise BadInput(f"a server needs {error.name}; pip install 'draftproof[server]'") from error
    listener, where = _listener(host, port)
    loaded = alone_engine(config_of(model, engine, bf16), "serve", prefix_cache << 20)
    server = Server(
        loaded, served_model_name or Path(model).name, rows=max_batch, queue=max_queue,
        length=max_model_len, timeout=timeout, key=api_key, price=price_per_hour,
    )  # fmt: skip

    class Uvicorn(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit:                        # told twice
                os._exit(1)
            super().handle_exit(sig, frame)

    show.note(f"serving {server.model} at {where} (page), /v1 (API), /metrics; Ctrl-C ends it")
    for one in (signal.SIGINT, signal.SIGTERM):         # uvicorn raises it again when all is done
        signal.signal(one, lambda *_: sys.exit(0))
    Uvicorn(uvicorn.Config(server.app(), log_level="warning", access_log=False)).run([listener])


def _listener(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that nobody can connect to yet, and its address."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        why = f"{error.strerror or error}; choose another --port or --host"
        raise BadInput(f"nothing can listen at {host}:{port}: {why}") from error
    return listener, f"http://{host}:{listener.getsockname()[1]}/"
