"""The demo model's 480 questions through HTTP: batching, chunking and streaming must not change one answer."""

import asyncio
import random
from typing import Any

import httpx
import pytest
from server_process import ServerProcess

LIMITS = httpx.Limits(max_connections=128, max_keepalive_connections=128)


async def ask(client: httpx.AsyncClient, row: dict[str, Any]) -> str:
    body = {"model": "gosling", "messages": row["messages"], "temperature": 0, "max_tokens": 400}
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


async def sample_something(client: httpx.AsyncClient, seed: int) -> None:
    body = {"prompt": "User: Tell me a story about a fox.\n\nAssistant:", "temperature": 1.2, "seed": seed, "max_tokens": 60}
    (await client.post("/v1/completions", json=body)).raise_for_status()


async def leave_early(client: httpx.AsyncClient) -> None:
    body = {
        "prompt": "User: Name the planets of the solar system.\n\nAssistant:",
        "max_tokens": 500,
        "stream": True,
        "ignore_eos": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            return


async def answers(url: str, rows: list[dict[str, Any]], concurrency: int, noise: bool) -> list[str]:
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=LIMITS) as client:

        async def one(number: int, row: dict[str, Any]) -> str:
            async with gate:
                if noise and number % 8 == 0:
                    await asyncio.gather(sample_something(client, number), leave_early(client))
                return await ask(client, row)

        return await asyncio.gather(*(one(number, row) for number, row in enumerate(rows)))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("concurrency", "noise"), [(1, False), (64, True)])
def test_every_answer_equals_the_reference(
    server: ServerProcess, evaluation: list[dict[str, Any]], concurrency: int, noise: bool
) -> None:
    rows = random.Random(concurrency).sample(evaluation, len(evaluation))
    found = asyncio.run(answers(server.url, rows, concurrency, noise))
    wrong = [(row["prompt"], row["reference"], text) for row, text in zip(rows, found, strict=True) if text != row["reference"]]
    assert not wrong[:3]
    assert len(found) == 480
