"""The client with a real engine process on the demo model: answers, refusals, aborts, death and restart."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from albatross.config import EngineConfig
from albatross.engine.client import EngineClient, Generation
from albatross.engine.messages import AbortRequest
from albatross.errors import CheckpointError, EngineDeadError, InvalidRequestError, QueueFullError
from albatross.sampling_params import SamplingParams

PROMPT = "User: What is the capital of Ethiopia?\n\nAssistant:"
ENDLESS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20_000)


def greedy(max_tokens: int = 50) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(
        EngineConfig(device="cpu", num_threads=1, max_num_seqs=4, max_queued_requests=6, max_prompt_tokens=500)
    )
    await client.wait_ready()
    yield client
    await client.close()


async def text_of(generation: Generation) -> list[str]:
    texts = [""] * len(generation.choices)
    with generation:
        while not generation.is_done:
            await asyncio.wait_for(generation.wait(), 30)
            for choice in generation.choices:
                delta = choice.take()
                texts[choice.index] += delta.text if delta else ""
    return texts


async def wait_for(condition: object, limit_s: float) -> float:
    started = time.monotonic()
    while not condition():  # type: ignore[operator]
        if time.monotonic() - started > limit_s:
            raise TimeoutError(f"{condition} did not come true in {limit_s} s")
        await asyncio.sleep(0.01)
    return time.monotonic() - started


async def test_many_requests_are_answered_right(client: EngineClient) -> None:
    ids = client.tokenizer.encode(PROMPT)
    generations = [client.generate([ids], greedy(), stop=["\n\n"]) for _ in range(10)]
    assert [await text_of(g) for g in generations] == [[" Addis Ababa"]] * 10


async def test_prompts_times_n_choices_have_their_own_places(client: EngineClient) -> None:
    prompts = [client.tokenizer.encode(PROMPT), client.tokenizer.encode(PROMPT.replace("Ethiopia", "Kenya"))]
    generation = client.generate(prompts, greedy(), n=2, stop=["\n\n"])
    assert await text_of(generation) == [" Addis Ababa"] * 2 + [" Nairobi"] * 2
    assert generation.prompt_tokens == len(prompts[0]) + len(prompts[1])


async def test_seeded_choices_differ_and_repeat(client: EngineClient) -> None:
    ids = client.tokenizer.encode("User: Tell me a story about a fox.\n\nAssistant:")
    params = SamplingParams(seed=5, max_tokens=30)
    first = await text_of(client.generate([ids], params, n=3))
    noise = client.generate([ids], SamplingParams(max_tokens=100))
    again = await text_of(client.generate([ids], params, n=3))
    noise.abort()
    assert first == again
    assert len(set(first)) == 3


async def test_a_full_server_refuses_at_once_and_serves_the_rest(client: EngineClient) -> None:
    ids = client.tokenizer.encode(PROMPT)
    accepted = [client.generate([ids], greedy(5)) for _ in range(10)]
    started = time.monotonic()
    with pytest.raises(QueueFullError) as refusal:
        client.generate([ids], greedy(5))
    assert time.monotonic() - started < 0.1
    assert refusal.value.retry_after_s >= 1
    for generation in accepted:
        await text_of(generation)
    assert await text_of(client.generate([ids], greedy(), stop=["\n\n"])) == [" Addis Ababa"]


async def test_a_prompt_that_is_too_long_is_refused_as_such_even_where_no_place_is_left(client: EngineClient) -> None:
    accepted = [client.generate([[5]], greedy(5)) for _ in range(10)]
    with pytest.raises(InvalidRequestError) as refusal:
        client.generate([[5] * 501], greedy())
    assert refusal.value.code == "context_length_exceeded"
    assert sum(worker.load or 0 for worker in client._workers) == 10
    for generation in accepted:
        await text_of(generation)


@pytest.mark.parametrize(
    ("prompts", "n", "words"),
    [
        ([[]], 1, ["at least one token"]),
        ([], 1, ["at least one prompt"]),
        ([[4096]], 1, ["4096"]),
        ([[-1]], 1, ["-1"]),
        ([[5] * 501], 1, ["500", "501"]),
        ([[5]], 0, ["n must"]),
        ([[5]], 5, ["n must", "4"]),
        ([[5]] * 60, 3, ["128", "180"]),
    ],
)
async def test_impossible_requests_are_refused_with_the_reason(
    client: EngineClient, prompts: list[list[int]], n: int, words: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        client.generate(prompts, greedy(), n=n)
    assert all(word in str(refusal.value) for word in words)
    with pytest.raises(InvalidRequestError):
        client.generate([[5]], SamplingParams(logit_bias={4096: 1.0}))
    assert len(await text_of(client.generate([[5] * 500], greedy(1)))) == 1


async def test_leaving_the_block_frees_the_slots(client: EngineClient) -> None:
    with client.generate([client.tokenizer.encode(PROMPT)], ENDLESS, n=4) as generation:
        await generation.wait()
    assert all(choice.take() is not None and choice.finish_reason == "abort" for choice in generation.choices)
    assert await wait_for(lambda: client.status.stats.num_running == 0, 3) < 3


async def test_ending_a_request_is_no_error_while_a_death_is_not_yet_noticed(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.generate([client.tokenizer.encode(PROMPT)], ENDLESS, stop=[" Addis"]) as stopped:
        with client.generate([client.tokenizer.encode(PROMPT)], ENDLESS) as left:
            await left.wait()

            def refuse(message: object) -> None:
                raise EngineDeadError("gone")

            monkeypatch.setattr(client._workers[0].supervisor, "send", refuse)
        assert await text_of(stopped) == [""]
        assert stopped.choices[0].finish_reason == "stop"
    assert left.choices[0].take() is not None
    assert left.choices[0].finish_reason == "abort"
    monkeypatch.undo()
    client._workers[0].supervisor.send(AbortRequest((stopped.choices[0].stream_id, left.choices[0].stream_id)))
    await wait_for(lambda: client.status.stats.num_running == 0, 3)


async def test_a_killed_engine_gives_errors_at_once_and_comes_back(client: EngineClient) -> None:
    ids = client.tokenizer.encode(PROMPT)
    generations = [client.generate([ids], ENDLESS) for _ in range(8)]
    await generations[0].wait()
    process = client._workers[0].supervisor._process
    assert process is not None
    killed = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    for generation in generations:
        await asyncio.wait_for(text_of(generation), 2)
        assert generation.choices[0].finish_reason == "error"
        assert "signal 9" in (generation.choices[0].error or "")
    assert client.status.state == "restarting"
    with pytest.raises(EngineDeadError):
        client.generate([ids], greedy())
    await wait_for(lambda: client.status.state == "ready", 10)
    assert await text_of(client.generate([ids], greedy(), stop=["\n\n"])) == [" Addis Ababa"]
    assert time.monotonic() - killed < 10
    assert client.status.restarts == 1


async def test_a_stuck_engine_is_noticed_and_replaced() -> None:
    client = await EngineClient.start(EngineConfig(device="cpu", num_threads=1, stall_timeout_s=2))
    await client.wait_ready()
    process = client._workers[0].supervisor._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    await wait_for(lambda: client.status.state == "restarting", 6)
    assert "no sign of life" in (client.status.reason or "")
    await wait_for(lambda: client.status.state == "ready", 10)
    await client.close()


async def test_a_model_that_cannot_be_loaded_is_said_and_not_tried_again(tmp_path: Path) -> None:
    client = await EngineClient.start(EngineConfig(model=str(tmp_path / "nothing.pth"), device="cpu"))
    with pytest.raises(CheckpointError, match=r"nothing\.pth"):
        await asyncio.wait_for(client.wait_ready(), 20)
    assert client.status.state == "failed"
    await client.close()


async def test_the_engine_leaves_when_its_front_is_gone() -> None:
    client = await EngineClient.start(EngineConfig(device="cpu", num_threads=1))
    await client.wait_ready()
    process = client._workers[0].supervisor._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    await asyncio.wait_for(process.wait(), 5)
    assert process.returncode == 0
    await client.close()


async def test_closing_leaves_no_process_and_no_socket_behind() -> None:
    client = await EngineClient.start(EngineConfig(device="cpu", num_threads=1))
    await client.wait_ready()
    process, folder = client._workers[0].supervisor._process, client._workers[0].supervisor._folder
    assert process is not None
    await client.close()
    assert process.returncode == 0
    assert not folder.exists()
    with pytest.raises(EngineDeadError):
        client.generate([[5]], greedy())
