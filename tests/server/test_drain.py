"""The way out: the first signal lets running answers finish and refuses new ones, the second ends everything at once."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fakes import FakeEngine
from sse import chunks, events

from albatross.config import ServerConfig
from albatross_server.errors import ErrorBody
from albatross_server.run import Server

pytestmark = pytest.mark.asyncio
Until = Callable[[Callable[[], bool]], Awaitable[None]]


def ask(live: httpx.AsyncClient, **fields: Any) -> "asyncio.Future[httpx.Response]":
    return asyncio.ensure_future(live.post("/v1/completions", json={"prompt": "A", **fields}))


async def test_running_answers_finish_and_new_ones_are_refused_while_probes_are_answered(
    live: httpx.AsyncClient, server: Server, engine: FakeEngine, until: Until
) -> None:
    engine.held.clear()
    running = [ask(live, stream=True), ask(live)]
    await until(lambda: len(engine.running) == 2)
    server.begin_drain()
    await asyncio.sleep(0)
    for refused in (await ask(live), await live.get("/readyz")):
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert ErrorBody.model_validate_json(refused.content).error.code == "draining"
    health = await live.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "draining")
    assert not server.should_exit
    engine.held.set()
    streamed, whole = await asyncio.gather(*running)
    assert chunks(streamed.text)[-1]["choices"][0]["finish_reason"] == "stop"
    assert whole.json()["choices"][0]["text"] == " Hello there."
    await until(lambda: server.should_exit)


async def test_an_idle_server_leaves_at_once(live: httpx.AsyncClient, server: Server, until: Until) -> None:
    server.begin_drain()
    await until(lambda: server.should_exit)


async def test_a_second_signal_ends_running_answers_with_an_error(
    live: httpx.AsyncClient, server: Server, engine: FakeEngine, until: Until
) -> None:
    engine.held.clear()
    running = [ask(live, stream=True), ask(live)]
    await until(lambda: len(engine.running) == 2)
    server.begin_drain()
    server.begin_drain()
    streamed, whole = await asyncio.gather(*running)
    check_cut_off(streamed, whole)
    assert not engine.running
    await until(lambda: server.should_exit)


def check_cut_off(streamed: httpx.Response, whole: httpx.Response) -> None:
    assert streamed.status_code == 200
    assert ErrorBody.model_validate(json.loads(events(streamed.text)[-1])).error.code == "draining"
    assert whole.status_code == 503
    assert ErrorBody.model_validate_json(whole.content).error.code == "draining"


class TestImpatience:
    """A server that waits for a tenth of a second."""

    @pytest.fixture
    def server_config(self) -> ServerConfig:
        return ServerConfig(port=0, drain_timeout_s=0.1)

    async def test_answers_that_outlast_the_drain_end_with_an_error(
        self, live: httpx.AsyncClient, server: Server, engine: FakeEngine, until: Until
    ) -> None:
        engine.held.clear()
        running = [ask(live, stream=True), ask(live)]
        await until(lambda: len(engine.running) == 2)
        server.begin_drain()
        streamed, whole = await asyncio.gather(*running)
        check_cut_off(streamed, whole)
        await until(lambda: server.should_exit)
