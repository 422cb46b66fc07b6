"""What a server tells Prometheus, under the names that vLLM's dashboards ask for."""

from __future__ import annotations

import time
from collections.abc import Callable

import prometheus_client as prometheus
from prometheus_client import Counter, Histogram

from draftproof.engine.prefix_cache import PrefixCache
from draftproof.engine.stats import RoundStats
from draftproof.server.scheduler import Scheduler

prometheus.disable_created_metrics()       # type: ignore[no-untyped-call]
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 30, 60, 180)


class Metrics:
    """Counters, gauges and histograms of one server. price: of an hour of the machine, in any
    currency. prefixes: what prompts begin with, unread."""

    def __init__(
        self, scheduler: Scheduler, model: str, price: float | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:  # fmt: skip
        self.prefixes, self._reused = prefixes, 0
        self.registry, self.started = prometheus.CollectorRegistry(), time.time()
        self.price, self._label, self._written = price, {"model_name": model}, 0
        count, time_, gauge = self._counter, self._histogram, self._gauge
        spec = "vllm:spec_decode_num"
        self.drafts = count(f"{spec}_drafts", "Rounds in which something was drafted.")
        self.drafted = count(f"{spec}_draft_tokens", "Draft tokens verified.")
        self.accepted = count(f"{spec}_accepted_tokens", "Draft tokens accepted.")
        self.at = count(f"{spec}_accepted_tokens_per_pos", "Accepted, by position.", "position")
        self.rounds = count("draftproof:target_forwards", "Rounds, plain ones included.")
        self.prompt_tokens = count("vllm:prompt_tokens", "Tokens of prompts.")
        self.reused = count("vllm:prefix_cache_hits", "Tokens of prompts that were not read.")
        self.generated = count("vllm:generation_tokens", "New tokens.")
        self.ended = count("vllm:request_success", "Requests ended, by reason.", "finished_reason")
        self.first_token = time_("vllm:time_to_first_token", "From arrival to the first token.")
        self.between = time_("vllm:inter_token_latency", "Per new token, between rounds' news.")
        self.latency = time_("vllm:e2e_request_latency", "From arrival to the last token.")
        gauge("vllm:num_requests_running", "Requests that run.", lambda: len(scheduler.running))
        gauge("vllm:num_requests_waiting", "Requests that wait.", lambda: len(scheduler.waiting))
        gauge("vllm:kv_cache_usage_perc", "Share of the KV cache's positions in use.",
              lambda: scheduler.tokens_held)
        if price is not None:
            gauge("draftproof:cost_per_million_tokens", "At the price given, since the start.",
                  self._cost)

    def ended_row(self, stats: RoundStats, tokens: int, reason: str) -> None:
        """A sample is finished."""
        self._written += tokens
        self.add(self.ended, 1, finished_reason=reason)
        self.add(self.generated, tokens)
        self.add(self.rounds, stats.rounds)
        self.add(self.drafts, stats.rounds - stats.by_width.get(0, 0))
        self.add(self.drafted, stats.drafted)
        self.add(self.accepted, stats.accepted)
        for position, count in enumerate(stats.accepted_at):
            self.add(self.at, count, position=str(position))

    def seen(self, histogram: Histogram, seconds: float) -> None:
        """Something took so long."""
        histogram.labels(**self._label).observe(seconds)

    def add(self, counter: Counter, count: int, **labels: str) -> None:
        """So many more."""
        counter.labels(**self._label, **labels).inc(count)

    def text(self) -> bytes:
        """The exposition format."""
        if self.prefixes is not None:
            reused, self._reused = self._reused, self.prefixes.reused
            self.add(self.reused, self._reused - reused)
        return prometheus.generate_latest(self.registry)

    def _cost(self) -> float:
        hours = (time.time() - self.started) / 3600
        return (self.price or 0.0) * hours / self._written * 1e6 if self._written else 0.0

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"{name}_seconds", about, ("model_name",), registry=self.registry,
                         buckets=SECONDS)

    def _gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        gauge = prometheus.Gauge(name, about, ("model_name",), registry=self.registry)
        gauge.labels(**self._label).set_function(value)
