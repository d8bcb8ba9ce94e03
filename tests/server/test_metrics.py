"""What /metrics says after requests: counted once each, and the engine's own figures beside them."""

import httpx
import pytest
from fakes import INFO, FakeEngine
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from albatross.engine.client import EngineStats, WorkerStatus

pytestmark = pytest.mark.asyncio


async def samples(client: httpx.AsyncClient) -> dict[str, float]:
    """Every sample of our own prefix, by name and label values."""
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name.startswith("rwkv:")
    }


async def test_requests_are_counted_by_route_status_and_reason(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": ["a", "b"]})
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    await client.post("/v1/completions", json={"prompt": 5})
    found = await samples(client)
    assert found["rwkv:http_responses_total /v1/completions 200"] == 2
    assert found["rwkv:http_responses_total /v1/completions 400"] == 1
    assert found["rwkv:request_success_total stop"] == 2
    assert found["rwkv:request_success_total length"] == 1


async def test_tokens_and_times_are_observed_once_a_request(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": [66, 67], "n": 2, "max_tokens": 3})
    found = await samples(client)
    assert found["rwkv:request_prompt_tokens_sum"] == 2
    assert found["rwkv:request_generation_tokens_sum"] == 6
    for name in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token"):
        assert found[f"rwkv:{name}_seconds_count"] == 1
    assert 0 < found["rwkv:time_to_first_token_seconds_sum"] <= found["rwkv:e2e_request_latency_seconds_sum"]


async def test_the_engines_figures_are_those_of_the_moment(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/completions", json={"prompt": [66, 67]})
    found = await samples(client)
    assert found["rwkv:engine_up 0"] == 1
    assert found["rwkv:prompt_tokens_total 0"] == 2
    assert found["rwkv:kv_cache_usage_perc 0"] == 0
    engine.state = "restarting"
    assert (await samples(client))["rwkv:engine_up 0"] == 0


async def test_each_worker_has_samples_of_its_own(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    busy = EngineStats(num_running=16, num_waiting=3, generated_tokens=70, discarded_tokens=5)
    engine.other_workers = [
        WorkerStatus("ready", None, replace(INFO, device="cuda:1"), busy, 0),
        WorkerStatus("restarting", "it died before it was ever ready", None, EngineStats(), 2),
    ]
    found = await samples(client)
    assert [found[f"rwkv:engine_up {worker}"] for worker in range(3)] == [1, 1, 0]
    assert [found[f"rwkv:num_requests_running {worker}"] for worker in range(3)] == [0, 16, 0]
    assert [found[f"rwkv:engine_restarts_total {worker}"] for worker in range(3)] == [0, 0, 2]
    assert [found[f"rwkv:discarded_tokens_total {worker}"] for worker in range(3)] == [0, 5, 0]
    assert found["rwkv:kv_cache_usage_perc 1"] == 0.25
    assert "rwkv:kv_cache_usage_perc 2" not in found
    (info,) = [name.split() for name in found if "cuda:1" in name]
    assert {"rwkv:engine_info", "1", "gosling"} <= set(info)
