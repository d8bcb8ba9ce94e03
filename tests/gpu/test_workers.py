"""Several engine processes on several cards: each has its own, and which one it is does not show in an answer."""

import asyncio

import pytest
import torch
from test_client import text_of

from albatross.config import EngineConfig
from albatross.engine.client import EngineClient
from albatross.errors import ConfigError
from albatross.sampling_params import SamplingParams

NUM_CARDS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_CARDS == 0, reason="needs a CUDA card"),
    pytest.mark.timeout(600),
]
STORY = "User: Tell me a story about a fox.\n\nAssistant:"


@pytest.mark.skipif(NUM_CARDS < 2, reason="needs two CUDA cards")
async def test_each_worker_has_a_card_of_its_own_and_draws_the_same() -> None:
    client = await EngineClient.start(EngineConfig(device="cuda", workers=2))
    try:
        await client.wait_ready()
        assert [worker.info and worker.info.device for worker in client.status.workers] == ["cuda:0", "cuda:1"]
        ids = client.tokenizer.encode(STORY)
        for params in (SamplingParams(temperature=0, max_tokens=100), SamplingParams(seed=7, max_tokens=100)):
            generations = [client.generate([ids], params) for _ in range(2)]
            assert [worker.load for worker in client._workers] == [1, 1]
            first, second = [await text_of(generation) for generation in generations]
            assert first == second
    finally:
        await client.close()


async def test_more_workers_than_cards_are_refused_and_none_is_left_behind() -> None:
    client = await EngineClient.start(EngineConfig(workers=NUM_CARDS + 1))
    with pytest.raises(ConfigError, match=f"workers is {NUM_CARDS + 1}, but torch sees {NUM_CARDS} CUDA card"):
        await asyncio.wait_for(client.wait_ready(), 120)
    processes = [worker.supervisor._process for worker in client._workers]
    assert all(process is not None and process.returncode is not None for process in processes)
    await client.close()
