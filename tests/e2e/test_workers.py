"""`albatross serve --workers 2` as a process: answers, probes and figures while one of its engines dies, and the way out."""

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess
from test_evaluation import answers

ENDLESS = {"prompt": "User: Tell me a story.\n\nAssistant:", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
NUM_STREAMS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess("--workers", "2", "--device", "cpu", "--num-threads", "1")
    wait_until(lambda: not httpx.get(server.url + "/readyz").json()["not_ready"], 20)
    yield server
    server.stop()


class Reader:
    """One stream, read in a thread of its own until it ends or `leave` is called."""

    def __init__(self, url: str) -> None:
        self.num_lines = 0
        self.last_line = ""
        self.leave = False
        self.thread = threading.Thread(target=self._read, args=(url,))
        self.thread.start()

    def _read(self, url: str) -> None:
        with httpx.stream("POST", url + "/v1/completions", json=ENDLESS, timeout=60) as response:
            for line in filter(None, response.iter_lines()):
                self.last_line = line
                self.num_lines += 1
                if self.leave:
                    return


def wait_until(condition: Any, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def by_worker(server: ServerProcess, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
    return {s.labels["worker"]: s.value for family in families for s in family.samples if s.name == name}


def test_both_workers_answer_as_one_does(server: ServerProcess, evaluation: list[dict[str, Any]]) -> None:
    rows = random.Random(2).sample(evaluation, 40)
    assert asyncio.run(answers(server.url, rows, 16, noise=True)) == [row["reference"] for row in rows]
    drawn = by_worker(server, "rwkv:generation_tokens_total")
    assert sorted(drawn) == ["0", "1"]
    assert min(drawn.values()) > 0


def test_a_killed_worker_is_named_and_replaced_while_the_other_goes_on(server: ServerProcess) -> None:
    readers = [Reader(server.url) for _ in range(NUM_STREAMS)]
    wait_until(lambda: all(reader.num_lines > 1 for reader in readers), 20)
    os.kill(min(server.engine_pids()), signal.SIGKILL)
    wait_until(lambda: sum(not reader.thread.is_alive() for reader in readers) == NUM_STREAMS // 2, 5)
    lost = [reader for reader in readers if not reader.thread.is_alive()]
    kept = [reader for reader in readers if reader not in lost]
    assert all("engine_unavailable" in reader.last_line for reader in lost)
    ready = httpx.get(server.url + "/readyz")
    assert ready.status_code == 200
    (away,) = ready.json()["not_ready"]
    assert "signal 9" in away["reason"]
    assert by_worker(server, "rwkv:engine_up")[str(away["worker"])] == 0
    body = {"prompt": "User: What is the capital of Ethiopia?\n\nAssistant:", "temperature": 0, "stop": ["\n\n"]}
    assert httpx.post(server.url + "/v1/completions", json=body, timeout=30).json()["choices"][0]["text"] == " Addis Ababa"
    before = [reader.num_lines for reader in kept]
    wait_until(lambda: all(reader.num_lines > number for reader, number in zip(kept, before, strict=True)), 5)
    wait_until(lambda: not httpx.get(server.url + "/readyz").json()["not_ready"], 20)
    assert sum(by_worker(server, "rwkv:engine_restarts_total").values()) == 1
    assert all(reader.thread.is_alive() for reader in kept)
    for reader in kept:
        reader.leave = True
        reader.thread.join(5)


def test_the_end_of_the_server_is_the_end_of_all_its_engines(server: ServerProcess) -> None:
    pids = server.engine_pids()
    assert len(pids) == 2
    assert server.stop() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
