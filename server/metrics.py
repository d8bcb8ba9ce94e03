"""Prometheus metrics, all named `rwkv:*`. The engine's own figures are read at each scrape, the others once per request.

Nothing here runs per token. Each application has a registry of its own; `/metrics` renders it.
"""

from collections.abc import Iterator
from time import perf_counter
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from albatross.engine.client import EngineStatus

from .lifecycle import Run

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class HasStatus(Protocol):
    """An engine client, as far as metrics look at it."""

    @property
    def status(self) -> EngineStatus: ...


class Metrics:
    """Counters and histograms of the HTTP side, and the engine's figures beside them."""

    def __init__(self, engine: HasStatus) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_EngineCollector(engine))
        self.answers = Counter(
            "rwkv:http_responses", "Answers of the generation routes by status.", ["route", "status"], registry=self.registry
        )
        self.finished = Counter(
            "rwkv:request_success", "Finished choices by the reason they ended.", ["finished_reason"], registry=self.registry
        )
        self.first_token = self._histogram("rwkv:time_to_first_token_seconds", "From acceptance to the first token.", _SECONDS)
        self.latency = self._histogram("rwkv:e2e_request_latency_seconds", "From acceptance to the last token.", _SECONDS)
        self.per_token = self._histogram(
            "rwkv:request_time_per_output_token_seconds", "Mean time between tokens of one request's choice.", _TOKEN_SECONDS
        )
        self.prompt_tokens = self._histogram("rwkv:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation_tokens = self._histogram("rwkv:request_generation_tokens", "Drawn tokens of a request.", _TOKENS)

    def observe(self, run: Run) -> dict[str, Any]:
        """Counts one request at its end, whatever ended it; returns the same figures for its log line."""
        choices, now = run.generation.choices, perf_counter()
        completion_tokens = run.completion_tokens
        for choice in choices:
            self.finished.labels(choice.finish_reason or "abort").inc()
        self.prompt_tokens.observe(run.generation.prompt_tokens)
        self.generation_tokens.observe(completion_tokens)
        self.latency.observe(now - run.accepted_at)
        facts = {
            "prompt_tokens": run.generation.prompt_tokens,
            "completion_tokens": completion_tokens,
            "finish_reasons": sorted({choice.finish_reason or "abort" for choice in choices}),
        }
        if run.first_token_at is not None:
            self.first_token.observe(run.first_token_at - run.accepted_at)
            facts["first_token_s"] = round(run.first_token_at - run.accepted_at, 4)
            longest = max(choice.num_tokens for choice in choices)
            if longest > 1:
                self.per_token.observe((now - run.first_token_at) / (longest - 1))
        return facts

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """Turns the engine's last report into metrics while a scrape is answered."""

    def __init__(self, engine: HasStatus) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status
        stats = status.stats
        yield GaugeMetricFamily("rwkv:engine_up", "1 while the engine takes requests.", value=status.state == "ready")
        yield CounterMetricFamily("rwkv:engine_restarts", "Engine processes that had to be replaced.", value=status.restarts)
        yield GaugeMetricFamily("rwkv:num_requests_running", "Sequences that hold a state slot.", value=stats.num_running)
        yield GaugeMetricFamily("rwkv:num_requests_waiting", "Sequences that wait for a state slot.", value=stats.num_waiting)
        yield GaugeMetricFamily("rwkv:num_waiting_tokens", "Prompt tokens that wait.", value=stats.num_waiting_tokens)
        yield CounterMetricFamily("rwkv:engine_steps", "Steps of the engine since it started.", value=stats.num_steps)
        yield CounterMetricFamily("rwkv:prompt_tokens", "Prompt tokens read since the engine started.", value=stats.prompt_tokens)
        yield CounterMetricFamily(
            "rwkv:generation_tokens", "Tokens drawn since the engine started.", value=stats.generated_tokens
        )
        yield GaugeMetricFamily("rwkv:step_seconds", "Time of the engine's last step.", value=stats.step_ms / 1e3)
        info = status.info
        if info is None:
            return
        used = stats.num_running / info.num_slots
        yield GaugeMetricFamily("rwkv:kv_cache_usage_perc", "Share of state slots in use, 0 to 1.", value=used)
        labels = {"model_name": info.model_name, "device": info.device, "dtype": info.dtype, "backend": info.backend}
        yield InfoMetricFamily("rwkv:engine", "What runs the model.", value=labels)
