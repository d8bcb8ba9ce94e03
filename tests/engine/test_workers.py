"""Two engine processes behind one client: how requests are spread, and what the death of one does to the others."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from test_client import ENDLESS, PROMPT, greedy, text_of, wait_for

from albatross.config import EngineConfig
from albatross.engine.client import Choice, EngineClient, Generation
from albatross.engine.process import build_core, config_of_worker
from albatross.errors import CheckpointError, ConfigError, EngineDeadError, QueueFullError
from albatross.llm import LLM
from albatross.sampling_params import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLOTS, QUEUE = 4, 2  # of each worker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(
        EngineConfig(
            device="cpu", num_threads=1, workers=2, max_num_seqs=SLOTS, max_queued_requests=QUEUE, max_queued_tokens=1000,
        )
    )  # fmt: skip
    await client.wait_ready()
    yield client
    await client.close()


@pytest.fixture
def ids(client: EngineClient) -> list[int]:
    return client.tokenizer.encode(PROMPT)


def loads(client: EngineClient) -> list[int | None]:
    return [worker.load for worker in client._workers]


def is_in(client: EngineClient, number: int, choice: Choice) -> bool:
    return choice.stream_id in client._workers[number]._streams


def leave(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.abort()


def pid_of(client: EngineClient, number: int) -> int:
    process = client._workers[number].supervisor._process
    assert process is not None
    return process.pid


async def test_requests_go_in_turn_to_both_workers_and_both_work(client: EngineClient, ids: list[int]) -> None:
    generations = [client.generate([ids], greedy(), stop=["\n\n"]) for _ in range(8)]
    assert loads(client) == [4, 4]
    assert [await text_of(generation) for generation in generations] == [[" Addis Ababa"]] * 8
    assert loads(client) == [0, 0]
    await wait_for(lambda: client.status.stats.generated_tokens > 0, 3)
    assert all(worker.stats.generated_tokens > 0 for worker in client.status.workers)
    assert client.status.stats.generated_tokens == sum(worker.stats.generated_tokens for worker in client.status.workers)


async def test_the_choices_of_one_prompt_stay_together_and_prompts_are_spread(client: EngineClient, ids: list[int]) -> None:
    with client.generate([ids, ids], ENDLESS, n=3) as generation:
        first, second = generation.choices[:3], generation.choices[3:]
        where = [next(number for number in (0, 1) if is_in(client, number, group[0])) for group in (first, second)]
        assert sorted(where) == [0, 1]
        assert all(is_in(client, where[0], choice) for choice in first)
        assert all(is_in(client, where[1], choice) for choice in second)
    assert loads(client) == [0, 0]


async def test_the_next_request_goes_where_fewer_streams_are_as_soon_as_they_have_ended(
    client: EngineClient, ids: list[int]
) -> None:
    large, small = client.generate([ids], ENDLESS, n=3), client.generate([ids], ENDLESS)
    busy = next(number for number in (0, 1) if is_in(client, number, large.choices[0]))
    more = [client.generate([ids], ENDLESS) for _ in range(2)]
    assert all(is_in(client, 1 - busy, generation.choices[0]) for generation in more)
    large.abort()
    last = client.generate([ids], ENDLESS)
    assert is_in(client, busy, last.choices[0])
    leave([small, *more, last])


async def test_the_places_of_all_workers_are_one_stock(client: EngineClient, ids: list[int]) -> None:
    room = 2 * (SLOTS + QUEUE)
    generations = [client.generate([ids], ENDLESS) for _ in range(room)]
    with pytest.raises(QueueFullError, match=f"{room} of {room} places"):
        client.generate([ids], ENDLESS)
    assert loads(client) == [room // 2, room // 2]
    leave(generations)


async def test_waiting_prompt_tokens_are_bounded_over_all_workers(client: EngineClient) -> None:
    generations = [client.generate([[5] * 900], ENDLESS) for _ in range(2)]
    with pytest.raises(QueueFullError, match="1800 prompt tokens wait, of at most 2000"):
        client.generate([[5] * 900], ENDLESS)
    leave(generations)


async def test_seeded_choices_do_not_depend_on_the_worker(client: EngineClient) -> None:
    story = client.tokenizer.encode("User: Tell me a story about a fox.\n\nAssistant:")
    params = SamplingParams(seed=5, max_tokens=20)
    texts = [await text_of(client.generate([story], params, n=2)) for _ in range(4)]  # in turn, two on each
    assert texts == [texts[0]] * 4


async def test_the_death_of_one_worker_ends_its_streams_alone_and_it_comes_back(client: EngineClient, ids: list[int]) -> None:
    generations = [client.generate([ids], ENDLESS) for _ in range(4)]
    for generation in generations:
        await generation.wait()
    lost = [generation for generation in generations if is_in(client, 0, generation.choices[0])]
    kept = [generation for generation in generations if is_in(client, 1, generation.choices[0])]
    assert (len(lost), len(kept)) == (2, 2)
    os.kill(pid_of(client, 0), signal.SIGKILL)
    for generation in lost:
        await asyncio.wait_for(text_of(generation), 2)
        choice = generation.choices[0]
        assert (choice.finish_reason, choice.is_lost) == ("error", True)
        assert "signal 9" in (choice.error or "")
    assert loads(client) == [None, 2]
    assert client.status.state == "ready"
    assert "worker 0 is restarting: the engine process ended with signal 9" in (client.status.reason or "")
    assert await text_of(client.generate([ids], greedy(), stop=["\n\n"])) == [" Addis Ababa"]
    with pytest.raises(QueueFullError, match=f"2 of {SLOTS + QUEUE} places"):
        client.generate([ids] * 5, ENDLESS)
    for choice in (generation.choices[0] for generation in kept):
        choice.take()
        await wait_for(lambda choice=choice: choice.take() is not None, 3)
        assert choice.finish_reason is None
    await wait_for(lambda: all(worker.state == "ready" for worker in client.status.workers), 20)
    assert client.status.reason is None
    assert (client.status.restarts, client.status.workers[1].restarts) == (1, 0)
    again = client.generate([ids], greedy(), stop=["\n\n"])
    assert is_in(client, 0, again.choices[0])
    assert await text_of(again) == [" Addis Ababa"]
    leave(kept)


async def test_a_death_that_is_not_yet_noticed_sends_the_request_to_the_other_worker(
    client: EngineClient, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(message: object) -> None:
        raise EngineDeadError("gone")

    monkeypatch.setattr(client._workers[0].supervisor, "send", refuse)
    generations = [client.generate([ids], ENDLESS) for _ in range(3)]
    assert loads(client) == [0, 3]
    monkeypatch.setattr(client._workers[1].supervisor, "send", refuse)
    with pytest.raises(EngineDeadError, match="gone"):
        client.generate([ids, ids], ENDLESS)
    assert loads(client) == [0, 3]
    monkeypatch.undo()
    leave(generations)


async def test_both_workers_answer_as_the_reference_does(client: EngineClient, evaluation: list[dict[str, Any]]) -> None:
    rows = evaluation[::20]
    gate = asyncio.Semaphore(SLOTS)

    async def answer(row: dict[str, Any]) -> str:
        async with gate:
            generation = client.generate([client.tokenizer.encode(row["prompt"])], greedy(400), stop=["\n\n", "\nUser:"])
            return (await text_of(generation))[0].strip()

    assert await asyncio.gather(*(answer(row) for row in rows)) == [row["reference"] for row in rows]


async def test_closing_leaves_none_of_the_processes_behind() -> None:
    client = await EngineClient.start(EngineConfig(device="cpu", num_threads=1, workers=2))
    await client.wait_ready()
    processes = [worker.supervisor._process for worker in client._workers]
    with client.generate([[5]], ENDLESS) as generation:
        await client.close()
        assert generation.choices[0].take() is not None
        assert generation.choices[0].finish_reason == "error"
    assert [process.returncode for process in processes if process is not None] == [0, 0]
    assert client.status.state == "stopped"
    with pytest.raises(EngineDeadError):
        client.generate([[5]], ENDLESS)


async def test_a_worker_that_cannot_start_stops_the_others_and_says_why(tmp_path: Path) -> None:
    client = await EngineClient.start(EngineConfig(device="cpu", num_threads=1, workers=2))
    client._workers[1].supervisor._config = EngineConfig(model=str(tmp_path / "nothing.pth"), device="cpu", workers=2)
    with pytest.raises(CheckpointError, match=r"nothing\.pth"):
        await asyncio.wait_for(client.wait_ready(), 30)
    processes = [worker.supervisor._process for worker in client._workers]
    assert all(process is not None and process.returncode is not None for process in processes)
    assert client.status.state == "failed"
    await client.close()


async def test_an_engine_that_still_loads_is_ended_at_once() -> None:
    client = await EngineClient.start(EngineConfig(device="cpu", num_threads=1, workers=2))
    await wait_for(lambda: all(worker.supervisor._process is not None for worker in client._workers), 5)
    processes = [worker.supervisor._process for worker in client._workers]
    await asyncio.wait_for(client.close(), 2)
    assert all(process is not None and process.returncode is not None for process in processes)


async def test_one_card_by_name_is_refused_for_several_workers() -> None:
    with pytest.raises(ConfigError, match=r"workers is 2, but device names one card \(cuda:2\)"):
        EngineConfig(device="cuda:2", workers=2)
    assert EngineConfig(device="cuda:2", workers=1).device == "cuda:2"


class TestCards:
    """A machine that is said to have two cards."""

    @pytest.fixture(autouse=True)
    def two_cards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    async def test_each_worker_has_the_card_of_its_number(self, device: str) -> None:
        configs = [config_of_worker(EngineConfig(device=device, workers=2), worker) for worker in range(2)]
        assert [(config.device, config.workers) for config in configs] == [("cuda:0", 1), ("cuda:1", 1)]

    async def test_more_workers_than_cards_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="workers is 3, but torch sees 2 CUDA cards"):
            config_of_worker(EngineConfig(workers=3), 0)

    async def test_one_worker_keeps_the_device_it_was_given(self) -> None:
        assert config_of_worker(EngineConfig(device="cuda:1"), 0).device == "cuda:1"

    async def test_workers_on_the_cpu_need_no_cards_and_share_its_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
        config = config_of_worker(EngineConfig(device="cpu", workers=3), 2)
        assert (config.device, config.num_threads) == ("cpu", 2)
        assert config_of_worker(EngineConfig(device="cpu", workers=3, num_threads=5), 2).num_threads == 5


@pytest.mark.parametrize("make", [lambda: build_core(EngineConfig(workers=2)), lambda: LLM(workers=2)])
async def test_an_engine_in_the_callers_process_is_one(make: Any) -> None:
    with pytest.raises(ConfigError, match="workers is 2, but an engine in this process is one"):
        make()
