"""A client that leaves: its generation, and only that, is aborted at once, streamed or not, queued or running."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fakes import FakeEngine

pytestmark = pytest.mark.asyncio
Until = Callable[[Callable[[], bool]], Awaitable[None]]


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "A", "max_tokens": 500, "ignore_eos": True, **fields}


@pytest.fixture
def endless(engine: FakeEngine) -> FakeEngine:
    engine.step_s = 0.01
    engine.script = lambda prompt, choice: [34]
    return engine


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_aborts(live: httpx.AsyncClient, endless: FakeEngine, until: Until, stream: bool, is_queued: bool) -> None:
    if is_queued:
        endless.held.clear()
    asking = asyncio.ensure_future(live.post("/v1/completions", json=body(stream=stream, n=2)))
    await until(lambda: len(endless.running) == 2)
    asking.cancel()
    await until(lambda: not endless.running)


async def test_a_stream_that_is_left_in_the_middle_aborts(live: httpx.AsyncClient, endless: FakeEngine, until: Until) -> None:
    async with live.stream("POST", "/v1/completions", json=body(stream=True)) as response:
        async for _ in response.aiter_lines():
            break
        assert len(endless.running) == 1
    await until(lambda: not endless.running)


async def test_the_others_go_on(live: httpx.AsyncClient, endless: FakeEngine, until: Until) -> None:
    asking = [asyncio.ensure_future(live.post("/v1/completions", json=body(max_tokens=40, stream=i % 2 == 0))) for i in range(10)]
    await until(lambda: len(endless.running) == 10)
    for task in asking[:4]:
        task.cancel()
    await until(lambda: len(endless.running) == 6)
    answers = await asyncio.gather(*asking[4:])
    assert all(answer.status_code == 200 for answer in answers)


async def test_an_abort_is_counted(live: httpx.AsyncClient, endless: FakeEngine, until: Until) -> None:
    asking = asyncio.ensure_future(live.post("/v1/completions", json=body()))
    await until(lambda: bool(endless.running))
    asking.cancel()
    await until(lambda: not endless.running)
    await asyncio.sleep(0.05)
    text = (await live.get("/metrics")).text
    assert 'rwkv:request_success_total{finished_reason="abort"} 1.0' in text
    assert 'rwkv:http_responses_total{route="/v1/completions",status="499"} 1.0' in text


async def test_a_client_that_leaves_while_it_sends_its_body_starts_nothing(live: httpx.AsyncClient, endless: FakeEngine) -> None:
    _, writer = await asyncio.open_connection(live.base_url.host, live.base_url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await asyncio.sleep(0.05)
    assert not endless.prompts
    assert (await live.get("/health")).status_code == 200
