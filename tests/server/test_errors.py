"""Errors of every path and every cause have the OpenAI shape, the right status and the right headers."""

import asyncio
from typing import Any

import httpx
import pytest
from fakes import FakeEngine
from fastapi.exceptions import RequestValidationError

from albatross.config import ServerConfig
from albatross.engine.client import EngineStats, WorkerStatus
from albatross_server.app import App
from albatross_server.errors import ErrorBody, to_api_error

pytestmark = pytest.mark.asyncio
GENERATION = ("/v1/chat/completions", "/v1/completions")
READ = ("/health", "/livez", "/readyz", "/version", "/metrics", "/v1/models", "/v1/models/gosling", "/openapi.json", "/docs")


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return ErrorBody.model_validate_json(response.content, strict=True).error.model_dump()


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/", "/v2/models", "/health/", "/%00", "/a b"])
async def test_an_unknown_path_is_a_404_with_a_body(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_found"


@pytest.mark.parametrize("path", READ)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_a_wrong_method_on_a_read_path_is_a_405(client: httpx.AsyncClient, path: str, method: str) -> None:
    response = await client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, HEAD, OPTIONS"
    assert error_of(response)["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "HEAD"])
async def test_a_wrong_method_on_a_generation_path_is_a_405(client: httpx.AsyncClient, path: str, method: str) -> None:
    response = await client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST, OPTIONS"


@pytest.mark.parametrize("path", [*READ, *GENERATION])
async def test_options_says_what_a_path_takes(client: httpx.AsyncClient, path: str) -> None:
    response = await client.options(path)
    assert (response.status_code, response.content) == (204, b"")
    assert "OPTIONS" in response.headers["allow"]


@pytest.mark.parametrize("path", READ)
async def test_head_answers_as_get_without_a_body(live: httpx.AsyncClient, path: str) -> None:
    head, get = await live.head(path), await live.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


async def test_every_path_of_the_document_exists_and_describes_its_errors(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert set(GENERATION) < set(document["paths"])
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            response = await client.request(method, path.replace("{model}", "gosling"), json={})
            assert response.status_code in (200, 400)
            assert "422" not in operation["responses"]
            assert operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorResponse")
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "temperature", "penalty_decay", "stream_options"} < set(fields)


async def test_an_unknown_model_is_named(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models/gpt-4o")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/problem+json", 200),
        (None, 200),
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
        ("multipart/form-data; boundary=x", 400),
        ("", 400),
    ],
)
async def test_only_json_is_read(client: httpx.AsyncClient, content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == status
    if status == 400:
        assert content_type is not None
        assert content_type.split(";")[0] in error_of(response)["message"]


async def test_a_body_beyond_the_limit_is_refused_by_its_announced_length(live: httpx.AsyncClient) -> None:
    response = await live.post("/v1/completions", content=b" " * ((1 << 20) + 1))
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert (await live.get("/health")).status_code == 200


async def test_a_body_beyond_the_limit_is_refused_while_it_is_read(live: httpx.AsyncClient) -> None:
    async def pieces() -> Any:
        for _ in range(40):
            yield b" " * (1 << 16)

    response = await live.post("/v1/completions", content=pieces())
    assert response.status_code == 413
    assert (await live.get("/health")).status_code == 200


async def test_a_full_queue_is_a_429_that_says_when_to_come_back(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_full = True
    response = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "8"
    assert error_of(response) == {
        "message": "The server is full.", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded",
    }  # fmt: skip


@pytest.mark.parametrize("state", ["loading", "restarting", "failed", "stopped"])
async def test_an_engine_that_is_not_ready_is_a_503_and_the_server_still_says_it_lives(
    client: httpx.AsyncClient, engine: FakeEngine, state: str
) -> None:
    engine.state, engine.reason = state, "the reason"
    for response in (await client.post("/v1/completions", json={"prompt": "a"}), await client.get("/readyz")):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        error = error_of(response)
        assert (error["type"], error["code"]) == ("server_error", state)
        assert "the reason" in error["message"]
    health = await client.get("/health")
    assert health.status_code == 200
    assert health.json()["engine"] == {"state": state, "reason": "the reason", "restarts": 0}
    assert (await client.get("/livez")).status_code == 200


async def test_a_worker_that_is_not_ready_is_named_while_another_serves(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.other_workers = [WorkerStatus("restarting", "the reason", None, EngineStats(), 3)]
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    assert [(worker["worker"], worker["reason"]) for worker in ready.json()["not_ready"]] == [(1, "the reason")]
    health = (await client.get("/health")).json()
    assert health["engine"] == {"state": "ready", "reason": "worker 1 is restarting: the reason", "restarts": 3}
    assert [(worker["state"], worker["device"]) for worker in health["workers"]] == [("ready", "cpu"), ("restarting", None)]
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_a_choice_that_fails_is_a_500_with_its_reason(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fails_at = 2
    response = await client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 500
    assert error_of(response) == {
        "message": "The logits of this request were not finite.", "type": "server_error", "param": None,
        "code": "generation_failed",
    }  # fmt: skip
    engine.fails_at = None
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_an_engine_that_dies_is_a_503(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.held.clear()
    asking = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "a"}))
    while not engine.running:
        await asyncio.sleep(0.005)
    engine.die()
    engine.other_workers = [WorkerStatus("ready", None, None, EngineStats(), 0)]  # the same request would be taken again
    response = await asking
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert error_of(response)["code"] == "engine_unavailable"


@pytest.mark.parametrize("path", [*GENERATION, "/health"])
async def test_a_failure_of_ours_tells_the_request_and_not_the_cause(
    app: App, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(engine, "generate", fail)
    monkeypatch.setattr(FakeEngine, "status", property(fail) if path == "/health" else FakeEngine.status)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"prompt": "a", "messages": [{"role": "user", "content": "hi"}]}
        response = await client.request("GET" if path == "/health" else "POST", path, json=body, headers={"x-request-id": "r-1"})
    assert response.status_code == 500
    error = error_of(response)
    assert "secret" not in response.text
    assert "r-1" in error["message"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")


async def test_a_request_id_that_is_no_plain_word_is_replaced(live: httpx.AsyncClient) -> None:
    response = await live.get("/health", headers={"x-request-id": "a b"})
    assert response.headers["x-request-id"] not in ("", "a b")


async def test_what_is_not_http_gets_the_same_body(live: httpx.AsyncClient) -> None:
    reader, writer = await asyncio.open_connection(live.base_url.host, live.base_url.port)
    writer.write(b"hello\r\n\r\n")
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert ErrorBody.model_validate_json(body, strict=True).error.code == "invalid_http"


class TestBehindAProxy:
    """A proxy that serves this server under a prefix and takes the prefix off."""

    @pytest.fixture
    def server_config(self) -> ServerConfig:
        return ServerConfig(port=0, root_path="/api")

    async def test_every_kind_of_route_is_found(self, live: httpx.AsyncClient) -> None:
        assert (await live.get("/health")).status_code == 200
        assert (await live.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert (await live.get("/openapi.json")).json()["servers"] == [{"url": "/api"}]


async def test_fastapis_own_validation_is_a_400_and_never_a_422() -> None:
    error = to_api_error(RequestValidationError([{"loc": ("query", "limit"), "msg": "Field required", "type": "missing"}]), "r")
    assert (error.status, error.param, error.message) == (400, "limit", "limit: Field required.")
