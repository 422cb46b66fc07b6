"""``draftproof serve``: a server for clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import logging
import os
import signal
import sys
from logging.config import dictConfig
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.served_models import sources_of
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.server.api import Server

KEY_VARIABLE = "DRAFTPROOF_API_KEY"
LEVELS = ("debug", "info", "warning", "error")


def _option(text: str | None = None, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="Server", **more)


def _models(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="Several models", **more)


Host = Annotated[str, _option("Address to listen on; 0.0.0.0 is all of them.", metavar="ADDRESS")]
Port = Annotated[int, _option(
    "Port to listen on; 0 is any free one.", min=0, max=65535, metavar="PORT")]
MaxBatch = Annotated[int, _option("Sequences that run in one batch.", min=1, metavar="B")]
MaxQueue = Annotated[int, _option("Requests that may wait; others get 429.", min=1, metavar="N")]
MaxLength = Annotated[int, _option(
    "The most tokens of a prompt and its answer.", min=2, metavar="N")]
Timeout = Annotated[float | None, _option(
    "Seconds that a request may take. Default: no limit.", min=0, metavar="S")]
Drain = Annotated[float, _option("Seconds that running requests have to finish after SIGTERM "
                                 "or Ctrl-C.", min=0, metavar="S")]
Key = Annotated[str | None, _option(
    f"Key that clients must send. Default: {KEY_VARIABLE}, else none.", metavar="KEY")]
Keys = Annotated[Path | None, _option("File of API keys, one per line.", metavar="FILE")]
PerKey = Annotated[int | None, _option(
    "Requests of one key that may run or wait; others get 429. Default: no limit.", min=1,
    metavar="N")]
Share = Annotated[bool, _option("Let each key draft from the texts of all keys.", metavar="")]
Origins = Annotated[list[str] | None, _option(
    "Web origins that may use the server, in addition to this machine's: https://NAME, or '*'; "
    "repeatable.", metavar="ORIGIN")]
Hosts = Annotated[list[str] | None, _option(
    "Host names by which clients address the server; repeatable. On a loopback address, others "
    "are refused.", metavar="NAME")]
Name = Annotated[str | None, _option(
    "The model's name in the API. Default: the name of its folder or file.", metavar="NAME")]
Prefixes = Annotated[int, _option(
    "Memory of the prefix cache, in MiB.", min=0, metavar="MiB")]
Price = Annotated[float | None, _option(
    "Machine price per hour, for cost metrics. Default: none.", min=0, metavar="X")]
LogLevel = Annotated[str, _option(
    f"Lowest level that is logged: {', '.join(LEVELS)}.", metavar="LEVEL")]
NoAccessLog = Annotated[bool, typer.Option(
    "--no-access-log", help="Do not log requests.", rich_help_panel="Server", metavar="")]
Also = Annotated[list[str] | None, _models(
    "Serve another model, loaded when a request names it: MODEL or NAME=MODEL; repeatable.",
    metavar="MODEL")]
Lora = Annotated[list[str] | None, _models(
    "Serve a LoRA adapter of MODEL, as PEFT saves it: FOLDER or NAME=FOLDER; repeatable.",
    metavar="FOLDER")]
Memory = Annotated[float | None, _models(
    "Memory for the weights of all loaded models; idle models are unloaded to make room. "
    "Default: no limit.", min=0, metavar="GiB")]
Idle = Annotated[float | None, _models(
    "Seconds without a request after which a model is unloaded. Default: never.", min=0,
    metavar="S")]


@opt.with_options(engine=None)
def serve(
    model: opt.Model, host: Host = "127.0.0.1", port: Port = 8000, max_batch: MaxBatch = 8,
    max_queue: MaxQueue = 256, max_model_len: MaxLength = 4096, timeout: Timeout = None,
    shutdown_timeout: Drain = 60, api_key: Key = None, api_keys: Keys = None,
    max_requests_per_key: PerKey = None, share_drafts: Share = False,
    allowed_origins: Origins = None, allowed_hosts: Hosts = None,
    served_model_name: Name = None, price_per_hour: Price = None, prefix_cache: Prefixes = 512,
    log_level: LogLevel = "info", no_access_log: NoAccessLog = False,
    also: Also = None, lora: Lora = None, model_memory: Memory = None, unload_after: Idle = None,
    bf16: opt.Bf16 = False, *, engine: dict[str, object],
) -> None:  # fmt: skip
    """Serve models through the APIs of OpenAI and Anthropic, with a web page at /."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))       # until the server runs
    try:
        from draftproof.server.api import Server
        from draftproof.server.guard import Access, is_loopback
        from draftproof.server.hosted_model import Limits
        from draftproof.server.models import Models
        from draftproof.server.web_server import (
            WebServer,
            listen,
            raise_descriptor_limit,
            share_heap,
        )
    except ImportError as error:
        raise BadInput(
            f"a server needs {error.name}: pip install fastapi httptools llguidance "
            "prometheus-client uvicorn"
        ) from error
    hosts = None if not (allowed_hosts or is_loopback(host)) else [host, *(allowed_hosts or ())]
    if log_level not in LEVELS:
        raise BadInput(f"--log-level was {log_level!r}; choose one of {', '.join(LEVELS)}")
    access = Access(_keys(api_key, api_keys), hosts, allowed_origins or (), max_requests_per_key)
    sources = sources_of(model, served_model_name, also or (), lora or (), engine, bf16,
                         prefix_cache << 20)
    listener, url = listen(host, port)
    _log(log_level, access_log=not no_access_log)
    raise_descriptor_limit()
    share_heap()
    models = Models(
        Limits(max_batch, max_queue, max_model_len, timeout), price=price_per_hour,
        memory=int(model_memory * 2**30) if model_memory is not None else None, idle=unload_after,
    )  # fmt: skip
    first, *_ = sources
    for name, source in sources.items():
        models.add(name, source)
    server = Server(sources[first].load(), first, access=access, shared=share_drafts, models=models)
    for line in _facts(server):
        show.note(line)
    show.note(f"serving {', '.join(sources)} at {url} (page), /v1 (API), /metrics; Ctrl-C ends it")
    for each in (signal.SIGINT, signal.SIGTERM):        # uvicorn raises it again at the end
        signal.signal(each, lambda *_: sys.exit(0))
    WebServer(server.app(), server.lifecycle, shutdown_timeout).run([listener])


def _keys(key: str | None, file: Path | None) -> list[str]:
    """The valid API keys of clients; none if the server is open."""
    variable = os.environ.get(KEY_VARIABLE)
    if key is None and variable is not None:
        key, where = variable, KEY_VARIABLE
    else:
        where = "--api-key"
    if key is not None and not key.strip():
        raise BadInput(f"{where} was empty, which would let everybody in; give a key, or leave "
                       "it out")
    if file is None:
        return [key.strip()] if key is not None else []
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--api-keys {file} cannot be read: {error}") from None
    stripped = map(str.strip, lines)
    keys = [line for line in stripped if line and not line.startswith("#")]
    if not keys:
        raise BadInput(f"--api-keys {file} has no key; write one per line, or leave it out")
    return [*keys, *([key.strip()] if key is not None else [])]


def _facts(server: Server) -> list[str]:
    """Facts about the models, the machine, and access."""
    import psutil

    from draftproof.model.diagnosis import paths

    engine, keys = server.engine, server.access.keys
    target, drafter = engine.target, engine.drafter.name
    memory = psutil.Process().memory_info().rss / 2**30
    dtype = str(target.dtype).removeprefix("torch.")
    quantised = f", {target.quantization}" if target.quantization is not None else ""
    most = engine.budget.max_draft_tokens
    drafts = f"drafts up to {most} tokens a round" if most else "none"
    access = f"{len(keys)} API keys" if keys else "no API key: anyone who reaches it may use it"
    learns = ("from the texts of all" if server.owners.shared or not keys
              else "for each key from its own texts")
    return [
        f"model: {server.model}, {dtype}{quantised}, {server.queue.length} of "
        f"{target.context} tokens of context, {memory:.1f} GiB of memory in use",
        f"computed by: {paths(target)['layers']}",
        f"drafter: {drafter}, {drafts}, {learns}",
        f"access: {access}",
    ]


def _log(level: str, access_log: bool) -> None:
    """Log with times on stderr; uvicorn logs only problems."""
    detailed = "DEBUG" if level == "debug" else "WARNING"
    loggers = {"draftproof": level.upper(), "uvicorn": "ERROR" if level == "error" else detailed}
    dictConfig({
        "version": 1, "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {name: {"handlers": ["stderr"], "level": wanted, "propagate": False}
                    for name, wanted in loggers.items()},
    })  # fmt: skip
    logging.getLogger("draftproof.access").disabled = not access_log
