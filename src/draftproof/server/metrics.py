"""Metrics for Prometheus, under the names that vLLM's dashboards use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import prometheus_client as prometheus
from prometheus_client import Counter, Gauge, Histogram

from draftproof.engine.engine import Completion

prometheus.disable_created_metrics()       # type: ignore[no-untyped-call]
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 30, 60, 180)

FINISHED = ("stop", "length")
"""Finish reasons of samples that were written to the end."""


M = TypeVar("M", Counter, Histogram, Gauge)


class Registry:
    """The metrics of all models of a server."""

    def __init__(self) -> None:
        self.registry, self._families = prometheus.CollectorRegistry(), dict[str, Any]()

    def counter(self, name: str, about: str, *labels: str) -> Counter:
        """A counter, which all models share."""
        family: Counter = self._family(Counter, name, about, labels)
        return family

    def histogram(self, name: str, about: str) -> Histogram:
        """A histogram of seconds."""
        family: Histogram = self._family(Histogram, name, about, (), buckets=SECONDS)
        return family

    def gauge(self, name: str, about: str) -> Gauge:
        """A gauge."""
        family: Gauge = self._family(Gauge, name, about, ())
        return family

    def text(self) -> bytes:
        """The exposition format."""
        return prometheus.generate_latest(self.registry)

    def _family(
        self, kind: Callable[..., M], name: str, about: str, labels: Sequence[str], **more: object
    ) -> M:
        if name not in self._families:
            names = ("model_name", *labels)
            self._families[name] = kind(name, about, names, registry=self.registry, **more)
        family: M = self._families[name]
        return family


class Metrics:
    """Counters and histograms of one model; gauges are added by `watch`."""

    def __init__(
        self, model: str, price: float | None = None, registry: Registry | None = None
    ) -> None:
        """
        Args:
            model: What clients call the model.
            price: Price of the machine per hour, in any currency.
            registry: The server's registry; None makes one.
        """
        self.registry, self.model = registry or Registry(), model
        self._started, self._written, self._watched = time.time(), 0, list[Gauge]()
        spec, count, seconds = "vllm:spec_decode_num", self._counter, self._histogram
        self.drafts = count(f"{spec}_drafts", "Rounds with at least one draft token.")
        self.drafted = count(f"{spec}_draft_tokens", "Draft tokens verified.")
        self.accepted = count(f"{spec}_accepted_tokens", "Draft tokens accepted.")
        self.rounds = count("draftproof:target_forwards", "Rounds, plain ones included.")
        self.prompt_tokens = count("vllm:prompt_tokens", "Tokens of prompts.")
        self.generated = count("vllm:generation_tokens", "New tokens.")
        self.first_token = seconds(
            "vllm:time_to_first_token", "Seconds from arrival to the first token."
        )
        self.between = seconds(
            "vllm:inter_token_latency", "Seconds per new token, between updates."
        )
        self.latency = seconds(
            "vllm:e2e_request_latency", "Seconds from arrival to the last token."
        )
        self._at = self.registry.counter(
            f"{spec}_accepted_tokens_per_pos", "Draft tokens accepted, by position.", "position")
        self._ended = self.registry.counter(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason")
        if price is not None:
            self.watch("draftproof:cost_per_million_tokens",
                       "Average cost since the start, at the given price.",
                       lambda: price * self._hours_per_million())

    def watch(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is read on request."""
        gauge = self.registry.gauge(name, about)
        gauge.labels(self.model).set_function(value)
        self._watched.append(gauge)

    def close(self) -> None:
        """Remove the gauges: the model is unloaded. Counters keep their values."""
        for gauge in self._watched:
            gauge.remove(self.model)
        self._watched.clear()

    def ended(self, done: Completion, seconds: float) -> None:
        """Count a sample that has ended.

        Args:
            done: The sample.
            seconds: Since its request arrived. Counted only if the sample is finished, not if the
                client has left or it failed.
        """
        stats, written = done.stats, len(done.tokens)
        if done.finish_reason in FINISHED:
            self.latency.observe(seconds)
        self._written += written
        self._ended.labels(self.model, done.finish_reason).inc()
        self.generated.inc(written)
        self.rounds.inc(stats.rounds)
        self.drafts.inc(stats.rounds - stats.by_width.get(0, 0))
        self.drafted.inc(stats.drafted)
        self.accepted.inc(stats.accepted)
        for position, count in enumerate(stats.accepted_at):
            self._at.labels(self.model, str(position)).inc(count)

    def text(self) -> bytes:
        """The exposition format."""
        return self.registry.text()

    def _hours_per_million(self) -> float:
        hours = (time.time() - self._started) / 3600
        return hours / self._written * 1e6 if self._written else 0.0

    def _counter(self, name: str, about: str) -> Counter:
        return self.registry.counter(name, about).labels(self.model)

    def _histogram(self, name: str, about: str) -> Histogram:
        return self.registry.histogram(f"{name}_seconds", about).labels(self.model)
