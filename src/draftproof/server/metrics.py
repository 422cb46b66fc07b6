"""What a server tells Prometheus, under the names that vLLM's dashboards ask for."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from draftproof.engine.stats import RoundStats
from draftproof.server.scheduler import Scheduler

disable_created_metrics()       # type: ignore[no-untyped-call]
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 30, 60, 180)


class Metrics:
    """Counters, gauges and histograms of one server. price: of an hour of the machine, in any currency."""

    def __init__(self, scheduler: Scheduler, model: str, price: float | None = None) -> None:
        self.registry, self.started, self.price = CollectorRegistry(), time.time(), price
        self._label = {"model_name": model}
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds in which something was drafted.")
        self.drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.at = self._counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by position.", "position")
        self.rounds = self._counter("draftproof:target_forwards", "Rounds, plain ones included.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.generated = self._counter("vllm:generation_tokens", "New tokens.")
        self.ended = self._counter("vllm:request_success", "Requests ended, by reason.", "finished_reason")
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.between = self._histogram("vllm:inter_token_latency_seconds", "Per new token, between two rounds' news.")
        self.latency = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self._gauge("vllm:num_requests_running", "Requests that run.", lambda: len(scheduler.running))
        self._gauge("vllm:num_requests_waiting", "Requests that wait.", lambda: len(scheduler.waiting))
        self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache's positions in use.", lambda: scheduler.tokens_held)
        if price is not None:
            self._gauge("draftproof:cost_per_million_tokens", "At the price per hour given, since the start.", self._cost)
        self._written = 0

    def ended_row(self, stats: RoundStats, tokens: int, reason: str) -> None:
        """A sample is finished."""
        self.ended.labels(**self._label, finished_reason=reason).inc()
        self.generated.labels(**self._label).inc(tokens)
        self._written += tokens
        self.rounds.labels(**self._label).inc(stats.rounds)
        self.drafts.labels(**self._label).inc(stats.rounds - stats.by_width.get(0, 0))
        self.drafted.labels(**self._label).inc(stats.drafted)
        self.accepted.labels(**self._label).inc(stats.accepted)
        for position, count in enumerate(stats.accepted_at):
            self.at.labels(**self._label, position=str(position)).inc(count)

    def seen(self, histogram: Histogram, seconds: float) -> None:
        histogram.labels(**self._label).observe(seconds)

    def add(self, counter: Counter, count: int) -> None:
        counter.labels(**self._label).inc(count)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _cost(self) -> float:
        hours = (time.time() - self.started) / 3600
        return (self.price or 0.0) * hours / self._written * 1e6 if self._written else 0.0

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(name, about, ("model_name",), registry=self.registry, buckets=SECONDS)

    def _gauge(self, name: str, about: str, value: object) -> None:
        Gauge(name, about, ("model_name",), registry=self.registry).labels(**self._label).set_function(value)  # type: ignore[arg-type]
