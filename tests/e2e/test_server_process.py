"""The whole server as a process: start, the OpenAI client, disconnects, a dying engine, a drain."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from server_process import CLI, ServerProcess

QUESTION = [{"role": "user", "content": "What is the capital of Ethiopia?"}]
PROMPT = "User: What is the capital of Ethiopia?\n\nAssistant:"
ENDLESS = {"prompt": PROMPT, "max_tokens": 30_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def stats(server: ServerProcess) -> dict[str, Any]:
    health: dict[str, Any] = httpx.get(server.url + "/health").json()
    return health


def running(server: ServerProcess) -> float:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("rwkv:num_requests_running"))


def test_the_server_answers_within_ten_seconds_of_its_start(server: ServerProcess) -> None:
    assert server.start_s < 10


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="gosling", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Addis Ababa", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_chat_stream_equals_the_whole_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="gosling", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True},  # type: ignore[arg-type]
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    whole = client.chat.completions.create(model="gosling", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_openai_completion_with_n_stop_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="gosling", prompt=PROMPT, n=2, stop=["\n\n", "aba"], logprobs=3, temperature=0)
    assert [choice.text for choice in answer.choices] == [" Addis Ab", " Addis Ab"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)
    assert all(len(top) >= 3 for top in logprobs.top_logprobs if top is not None)


def test_a_seed_repeats_a_story(client: openai.OpenAI) -> None:
    tell = [{"role": "user", "content": "Tell me a story about a fox."}]
    texts = [
        client.chat.completions.create(model="gosling", messages=tell, seed=seed, n=2).choices[0].message.content  # type: ignore[arg-type]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_client_that_leaves_frees_its_slot_within_a_second(server: ServerProcess) -> None:
    with httpx.stream("POST", server.url + "/v1/completions", json=ENDLESS, timeout=30) as response:
        lines = response.iter_lines()  # kept, since an iterator that is dropped closes the connection
        next(lines)
        while running(server) < 1:
            time.sleep(0.01)
    left = time.monotonic()
    while running(server) > 0:
        assert time.monotonic() - left < 3
        time.sleep(0.02)


def test_health_answers_while_a_huge_prompt_is_refused(server: ServerProcess) -> None:
    statuses: list[int] = []
    body = json.dumps({"prompt": "word " * 3_000_000})
    sender = threading.Thread(
        target=lambda: statuses.append(httpx.post(server.url + "/v1/completions", content=body, timeout=60).status_code)
    )
    sender.start()
    slowest = 0.0
    while sender.is_alive():
        started = time.monotonic()
        assert httpx.get(server.url + "/health", timeout=10).status_code == 200
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(0.02)
    assert statuses == [400]
    assert slowest < 1


def test_a_killed_engine_under_load_gives_clean_errors_and_the_server_recovers(server: ServerProcess) -> None:
    ends: list[str] = []

    def read_until_the_end() -> None:
        with httpx.stream("POST", server.url + "/v1/completions", json=ENDLESS, timeout=60) as response:
            ends.append([line for line in response.iter_lines() if line][-1])

    readers = [threading.Thread(target=read_until_the_end) for _ in range(8)]
    for reader in readers:
        reader.start()
    while running(server) < 8:
        time.sleep(0.05)
    killed = time.monotonic()
    os.kill(server.engine_pid(), signal.SIGKILL)
    for reader in readers:
        reader.join(5)
    assert len(ends) == 8
    for end in ends:
        error = json.loads(end.removeprefix("data: "))["error"]
        assert error["type"]
        assert "Traceback" not in error["message"]
    refused = httpx.post(server.url + "/v1/completions", json={"prompt": PROMPT})
    assert refused.status_code in (200, 503)
    assert httpx.get(server.url + "/health").status_code == 200
    server.wait_ready(10)
    body = {"prompt": PROMPT, "temperature": 0, "stop": ["\n\n"]}
    assert httpx.post(server.url + "/v1/completions", json=body, timeout=30).json()["choices"][0]["text"] == " Addis Ababa"
    assert time.monotonic() - killed < 10


def test_sigterm_lets_a_running_answer_finish_and_refuses_new_ones() -> None:
    server = ServerProcess()
    num_tokens = 20_000 if torch.cuda.is_available() else 150  # some seconds
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True}
    results: list[httpx.Response] = []
    sender = threading.Thread(target=lambda: results.append(httpx.post(server.url + "/v1/completions", json=body, timeout=60)))
    sender.start()
    while running(server) < 1:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    refused = httpx.post(server.url + "/v1/completions", json=body)
    sender.join()
    assert results[0].status_code == 200
    assert results[0].json()["usage"]["completion_tokens"] == num_tokens
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("/nowhere/model.pth",), "/nowhere/model.pth"),
        (("--device", "cuda:7"), "cuda:7"),
        (("--device", "cuda:0", "--workers", "2"), "workers"),
        (("--max-num-seqs", "0"), "max_num_seqs"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_sentence(flags: tuple[str, ...], words: str) -> None:
    command = [*CLI, "serve", "--port", "0", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode != 0
    assert words.replace("_", "") in ended.stderr.replace("_", "").replace("-", "")
    assert "Traceback" not in ended.stderr


def test_a_model_in_a_folder_with_spaces_and_other_letters_is_served(tmp_path: Path) -> None:
    from albatross.config import EngineConfig

    folder = tmp_path / "my models 模型"
    folder.mkdir()
    source = EngineConfig().model_path
    for path in (source, source.with_suffix(".json")):
        (folder / path.name).symlink_to(path)
    server = ServerProcess(str(folder / source.name))
    body = {"messages": QUESTION, "temperature": 0}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=30).json()
    assert answer["choices"][0]["message"]["content"] == "Addis Ababa"
    assert server.stop() == 0
