"""``draftproof serve``: an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.setup import engine_of, gaudi_words
from draftproof.engine.config import EngineConfig
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
    model: opt.Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    max_batch: MaxBatch = 8,
    max_queue: MaxQueue = 256,
    max_model_len: MaxLength = 4096,
    timeout: Timeout = None,
    api_key: Key = None,
    served_model_name: Name = None,
    price_per_hour: Price = None,
    prefix_cache: Prefixes = 512,
    bf16: opt.Bf16 = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Serve a model over OpenAI's API, in batches, with a page at / to try it."""
    from draftproof.engine.prefix_cache import PrefixCache

    config = EngineConfig(model, **gaudi_words(engine, bf16))
    if config.parallel is not None:
        raise BadInput("a server runs in one process; leave --parallel out")
    try:
        from draftproof.server.api import Server
    except ImportError as error:
        raise BadInput(f"a server needs {error.name}; pip install 'draftproof[server]'") from error
    loaded = engine_of(config)
    loaded.prefixes = PrefixCache(prefix_cache << 20) if prefix_cache else None
    server = Server(
        loaded, served_model_name or Path(model).name, rows=max_batch, queue=max_queue,
        length=max_model_len, timeout=timeout, key=api_key, price=price_per_hour,
    )  # fmt: skip
    where = f"http://{host}:{port}/ (page), /v1 (API), /metrics"
    show.note(f"serving {server.model} at {where}; Ctrl-C ends it")
    asyncio.run(_until_told(server, host, port))


async def _until_told(server: Any, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; then finish what runs, while new requests get 503. The second
    signal ends at once."""
    import uvicorn

    class Uvicorn(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False}
    listener = Uvicorn(uvicorn.Config(server.app(), host=host, port=port, **quiet))
    loop = asyncio.get_running_loop()

    async def drain() -> None:
        await asyncio.to_thread(server.scheduler.close)
        listener.should_exit = True

    def stop() -> None:
        if server.scheduler.closing:
            os._exit(1)
        server.scheduler.closing = True
        tasks.append(loop.create_task(drain()))

    tasks: list[asyncio.Task[None]] = []
    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, stop)
    await listener.serve()
    if not tasks:                                               # it could not listen
        raise BadInput(f"nothing can listen at {host}:{port}; choose another --port")
