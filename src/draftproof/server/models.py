"""The models of a server, by name: loaded on request, unloaded when idle."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from fastapi.concurrency import run_in_threadpool

from draftproof.engine.engine import Engine
from draftproof.errors import DraftproofError, Unavailable
from draftproof.server.hosted_model import HostedModel, Limits
from draftproof.server.metrics import Metrics, Registry
from draftproof.server.request_queue import Worker

LOGGER = logging.getLogger("draftproof.server")


@dataclass(frozen=True)
class Source:
    """A model that can be loaded.

    Attributes:
        load: Loads it.
        size: Approximate bytes of memory.
        parent: The model that an adapter belongs to, if it is one.
    """

    load: Callable[[], Engine]
    size: int = 0
    parent: str | None = None


class Models:
    """Models by name. One that runs requests is never unloaded."""

    def __init__(
        self, limits: Limits, *, price: float | None = None, memory: int | None = None,
        idle: float | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            limits: Limits of the requests of each model.
            price: Price of the machine per hour, for the metrics.
            memory: The most bytes of all loaded models together; None: no limit.
            idle: Seconds after which a model without requests is unloaded; None keeps it.
        """
        self.limits, self.price, self.memory, self.idle = limits, price, memory, idle
        self.worker, self.registry = Worker(), Registry()
        self.sources, self.loaded = dict[str, Source](), dict[str, HostedModel]()
        self.created, self.first = int(time.time()), ""
        self._loading: asyncio.Lock | None = None

    def add(self, name: str, source: Source) -> None:
        """Add a model that clients may request. The first one is the default."""
        self.first = self.first or name
        self.sources[name] = source

    def host(self, name: str, engine: Engine) -> HostedModel:
        """Serve an engine that is loaded."""
        self.first = self.first or name
        metrics = Metrics(name, self.price, self.registry)
        self.loaded[name] = HostedModel(engine, name, self.limits, self.worker, metrics)
        return self.loaded[name]

    def names(self) -> Iterator[str]:
        """The models that clients may request."""
        return iter(dict.fromkeys([self.first, *self.loaded, *self.sources]))

    def check(self, name: str | None) -> str:
        """The name of the model for a request.

        Raises:
            Unavailable: There is no model of this name.
        """
        if name is None:
            return self.first
        if name not in self.loaded and name not in self.sources:
            known = ", ".join(self.names())
            why = f"there is no model {name[:99]!r} here; this is {known:.500}"
            raise Unavailable(why, 404, "model_not_found")
        return name

    async def get(self, name: str | None) -> HostedModel:
        """A model, loaded if necessary.

        Raises:
            Unavailable: There is no model of this name, or it cannot be loaded.
        """
        name = self.check(name)
        hosted = self.loaded.get(name)
        if hosted is not None:
            return hosted
        self._loading = self._loading or asyncio.Lock()
        async with self._loading:                           # one at a time
            hosted = self.loaded.get(name)
            return hosted if hosted is not None else await self._load(name)

    async def _load(self, name: str) -> HostedModel:
        source = self.sources[name]
        await self._make_room(source.size)
        LOGGER.info("loading %s", name)
        try:
            engine = await run_in_threadpool(source.load)
        except DraftproofError as error:
            raise Unavailable(f"{name} cannot be loaded: {error}", 503) from error
        return self.host(name, engine)

    async def _make_room(self, size: int) -> None:
        """Unload idle models, the longest idle first, until the next model fits. Wait if all are
        busy."""
        while self.memory is not None and self.loaded and self._taken() + size > self.memory:
            resting = [hosted for hosted in self._unloadable() if not hosted.busy]
            if resting:
                await self.unload(min(resting, key=lambda hosted: hosted.used_at).name)
            elif not any(True for _ in self._unloadable()):
                return                                      # nothing to unload
            else:
                await asyncio.sleep(0.1)

    def _taken(self) -> int:
        return sum(self.sources[name].size for name in self.loaded if name in self.sources)

    def _unloadable(self) -> Iterator[HostedModel]:
        return (hosted for name, hosted in self.loaded.items() if name in self.sources)

    async def unload(self, name: str) -> None:
        """Unload an idle model."""
        LOGGER.info("unloading %s", name)
        self.loaded.pop(name).close()
        await run_in_threadpool(_collect)

    async def unload_idle(self) -> None:
        """Unload models that are idle for too long, in an endless loop."""
        while self.idle is not None:
            await asyncio.sleep(min(1.0, self.idle / 4))
            now = time.monotonic()
            for hosted in list(self._unloadable()):
                if hosted.busy:
                    hosted.used_at = now
                elif now - hosted.used_at > self.idle:
                    await self.unload(hosted.name)


def _collect() -> None:
    """Return freed memory to the system."""
    gc.unfreeze()                       # loaded models are excluded from collections
    gc.collect()
    gc.freeze()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)                        # otherwise glibc keeps it
