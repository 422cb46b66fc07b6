"""What a server tells Prometheus, under the names that vLLM's dashboards ask for."""

from __future__ import annotations

import time
from collections.abc import Callable

import prometheus_client as prometheus
from prometheus_client import Counter, Gauge, Histogram

from draftproof.engine.engine import Completion

prometheus.disable_created_metrics()       # type: ignore[no-untyped-call]
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 30, 60, 180)

FINISHED = ("stop", "length")
"""Finish reasons of samples that were written to their end."""


class Metrics:
    """Counters and histograms of one server; gauges are added by `watch`.

    price: of an hour of the machine, in any currency.
    """

    def __init__(self, model: str, price: float | None = None) -> None:
        self.registry, self.model = prometheus.CollectorRegistry(), model
        self._started, self._written = time.time(), 0
        spec, count, seconds = "vllm:spec_decode_num", self._counter, self._histogram
        self.drafts = count(f"{spec}_drafts", "Rounds in which something was drafted.")
        self.drafted = count(f"{spec}_draft_tokens", "Draft tokens verified.")
        self.accepted = count(f"{spec}_accepted_tokens", "Draft tokens accepted.")
        self.rounds = count("draftproof:target_forwards", "Rounds, plain ones included.")
        self.prompt_tokens = count("vllm:prompt_tokens", "Tokens of prompts.")
        self.generated = count("vllm:generation_tokens", "New tokens.")
        self.first_token = seconds("vllm:time_to_first_token", "From arrival to the first token.")
        self.between = seconds("vllm:inter_token_latency", "Per new token, between rounds' news.")
        self.latency = seconds("vllm:e2e_request_latency", "From arrival to the last token.")
        labels, registry = ("model_name", "position"), self.registry
        name = f"{spec}_accepted_tokens_per_pos"
        self._at = Counter(name, "Accepted, by position.", labels, registry=registry)
        labels = ("model_name", "finished_reason")
        self._ended = Counter("vllm:request_success", "Ended, by reason.", labels,
                              registry=registry)
        if price is not None:
            self.watch("draftproof:cost_per_million_tokens", "At the price given, since the start.",
                       lambda: price * self._hours_per_million())

    def watch(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Tell a value that is asked for when it is wanted."""
        gauge = Gauge(name, about, ("model_name",), registry=self.registry)
        gauge.labels(self.model).set_function(value)

    def ended(self, done: Completion, seconds: float) -> None:
        """Count a sample that has ended.

        Args:
            done: The sample.
            seconds: From the arrival of its request; counted only if the sample is finished, not
                if its client has left or it failed.
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
        return prometheus.generate_latest(self.registry)

    def _hours_per_million(self) -> float:
        hours = (time.time() - self._started) / 3600
        return hours / self._written * 1e6 if self._written else 0.0

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(name, about, ("model_name",), registry=self.registry).labels(self.model)

    def _histogram(self, name: str, about: str) -> Histogram:
        made = Histogram(f"{name}_seconds", about, ("model_name",), registry=self.registry,
                         buckets=SECONDS)
        return made.labels(self.model)
