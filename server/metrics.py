"""Prometheus metrics, all named `rwkv:*`. The engine's own figures are read at each scrape, the others once per request.

Nothing here runs per token. Each application has a registry of its own; `/metrics` renders it.
"""

from collections.abc import Iterator, Sequence
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
    """Turns the workers' last reports into metrics while a scrape is answered; each sample names its worker."""

    def __init__(self, engine: HasStatus) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        workers = self._engine.status.workers
        stats = [worker.stats for worker in workers]
        yield _gauge("engine_up", "1 while the engine takes requests.", [worker.state == "ready" for worker in workers])
        yield _counter("engine_restarts", "Engine processes that had to be replaced.", [worker.restarts for worker in workers])
        yield _gauge("num_requests_running", "Sequences that hold a state slot.", [each.num_running for each in stats])
        yield _gauge("num_requests_waiting", "Sequences that wait for a state slot.", [each.num_waiting for each in stats])
        yield _gauge("num_waiting_tokens", "Prompt tokens that wait.", [each.num_waiting_tokens for each in stats])
        yield _counter("engine_steps", "Steps of the engine since it started.", [each.num_steps for each in stats])
        yield _counter("prompt_tokens", "Prompt tokens read since the engine started.", [each.prompt_tokens for each in stats])
        yield _counter("generation_tokens", "Tokens drawn since the engine started.", [each.generated_tokens for each in stats])
        yield _counter("discarded_tokens", "Tokens drawn for ended sequences.", [each.discarded_tokens for each in stats])
        yield _gauge("step_seconds", "Time of the engine's last step.", [each.step_ms / 1e3 for each in stats])
        used = [None if worker.info is None else worker.stats.num_running / worker.info.num_slots for worker in workers]
        yield _gauge("kv_cache_usage_perc", "Share of state slots in use, 0 to 1.", used)
        engines = InfoMetricFamily("rwkv:engine", "What runs the model.", labels=["worker"])
        for number, worker in enumerate(workers):
            if (info := worker.info) is not None:
                facts = {"model_name": info.model_name, "device": info.device, "dtype": info.dtype, "backend": info.backend}
                engines.add_metric([str(number)], facts)
        yield engines


def _gauge(name: str, text: str, values: Sequence[float | None]) -> Metric:
    return _by_worker(GaugeMetricFamily("rwkv:" + name, text, labels=["worker"]), values)


def _counter(name: str, text: str, values: Sequence[float | None]) -> Metric:
    return _by_worker(CounterMetricFamily("rwkv:" + name, text, labels=["worker"]), values)


def _by_worker(family: GaugeMetricFamily | CounterMetricFamily, values: Sequence[float | None]) -> Metric:
    for number, value in enumerate(values):
        if value is not None:
            family.add_metric([str(number)], value)
    return family
