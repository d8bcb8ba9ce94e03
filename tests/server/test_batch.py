"""`albatross batch` on a fake engine: rows as the API would answer, going on after a stop, and engines that die."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine

from albatross.cli import batch
from albatross.config import EngineConfig
from albatross.engine.client import EngineClient, Generation
from albatross.errors import EngineDeadError, InvalidRequestError

NUM_LINES = 40


class Engines:
    """Replaces the start of an engine process; keeps what was started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[FakeEngine] = []
        self.kind: type[FakeEngine] = FakeEngine
        monkeypatch.setattr(EngineClient, "start", self.start)

    async def start(self, config: EngineConfig) -> FakeEngine:
        self.started.append(self.kind(config))
        return self.started[-1]


class DyingEngine(FakeEngine):
    """Loses its first streams, and is ready again at the second look."""

    num_deaths = 0

    def generate(self, *arguments: Any, **keywords: Any) -> Generation:
        generation = super().generate(*arguments, **keywords)
        if self.num_deaths == 0:
            self.num_deaths = 1
            self.die()
        return generation

    @property
    def status(self) -> Any:
        status = super().status
        self.state = "ready"
        return status


class DeadEngine(FakeEngine):
    """Dies with its first request and never comes back."""

    def generate(self, *arguments: Any, **keywords: Any) -> Generation:
        self.state, self.reason = "restarting", "the engine process ended with signal 9"
        raise EngineDeadError("The engine is not ready.")


class CrowdedEngine(FakeEngine):
    """Has room for one request at a time."""

    def generate(self, *arguments: Any, **keywords: Any) -> Generation:
        self.is_full = bool(self.running)
        return super().generate(*arguments, **keywords)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    return Engines(monkeypatch)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [
        {"custom_id": f"q{i}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": f"question {i}"}]}}
        for i in range(NUM_LINES)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(source: Path, results: Path, **settings: Any) -> list[dict[str, Any]]:
    batch.run_batch(EngineConfig(max_num_seqs=4, **settings), source, results)
    return rows_of(results)


def test_every_line_gets_one_row_with_the_answer_of_the_api(engines: Engines, source: Path, results: Path) -> None:
    rows = run(source, results)
    assert Counter(row["custom_id"] for row in rows) == Counter(f"q{i}" for i in range(NUM_LINES))
    response = rows[0]["response"]
    assert response["status_code"] == 200
    assert response["body"]["object"] == "chat.completion"
    assert response["body"]["choices"][0]["message"]["content"] == "Hello there."
    assert response["body"]["usage"]["completion_tokens"] > 0


def test_a_line_may_ask_for_its_prompt_to_be_scored(engines: Engines, source: Path, results: Path) -> None:
    body = {"prompt": [66, 67, 68], "echo": True, "logprobs": 1, "max_tokens": 0, "prompt_logprobs": 0}
    source.write_text(json.dumps({"custom_id": "s", "method": "POST", "url": "/v1/completions", "body": body}))
    (row,) = run(source, results)
    (choice,) = row["response"]["body"]["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ABC", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.125, -0.25]
    assert [entry and entry["68"]["rank"] for entry in choice["prompt_logprobs"][::2]] == [None, 2]


def test_a_second_run_asks_only_for_what_is_missing(engines: Engines, source: Path, results: Path) -> None:
    whole = run(source, results)
    kept = [row for row in results.read_text().splitlines(keepends=True) if '"q1' not in row]  # q1 and q10 to q19 are lost
    results.write_text("".join(kept) + '{"id":"batch_req_0000')
    rows = run(source, results)
    assert len(engines.started[1].prompts) == 11
    assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in whole)


def test_nothing_is_started_when_all_is_done(engines: Engines, source: Path, results: Path) -> None:
    run(source, results)
    before = results.read_bytes()
    run(source, results)
    assert len(engines.started) == 1
    assert results.read_bytes() == before


def test_bad_lines_and_bad_bodies_get_error_rows_and_stop_nobody(engines: Engines, source: Path, results: Path) -> None:
    bad_body = {"custom_id": "hot", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "temperature": 9}}
    source.write_text("{broken\n" + json.dumps(bad_body) + "\n" + source.read_text())
    rows = {row["id"]: row for row in run(source, results)}
    assert len(rows) == NUM_LINES + 2
    assert rows["batch_req_000001"]["error"]["code"] == "invalid_line"
    refused = rows["batch_req_000002"]["response"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "temperature")


def test_a_request_lost_with_its_engine_is_asked_again(engines: Engines, source: Path, results: Path) -> None:
    engines.kind = DyingEngine
    rows = run(source, results)
    assert [row["response"]["status_code"] for row in rows] == [200] * NUM_LINES


def test_an_engine_that_does_not_come_back_ends_the_run_without_rows(engines: Engines, source: Path, results: Path) -> None:
    engines.kind = DeadEngine
    with pytest.raises(EngineDeadError, match="signal 9"):
        run(source, results, start_timeout_s=0.2)
    assert rows_of(results) == []


def test_a_full_queue_is_waited_for(engines: Engines, source: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "POLL_S", 0.001)
    engines.kind = CrowdedEngine
    rows = run(source, results)
    assert [row["response"]["status_code"] for row in rows] == [200] * NUM_LINES


def test_a_request_that_never_fits_is_refused(engines: Engines, source: Path, results: Path) -> None:
    class FullEngine(FakeEngine):
        def generate(self, *arguments: Any, **keywords: Any) -> Generation:
            self.is_full = True
            return super().generate(*arguments, **keywords)

    engines.kind = FullEngine
    rows = run(source, results)
    assert [row["response"]["status_code"] for row in rows] == [429] * NUM_LINES


def test_the_output_must_be_another_file(engines: Engines, source: Path) -> None:
    with pytest.raises(InvalidRequestError, match="another than the input"):
        batch.run_batch(EngineConfig(), source, source)
