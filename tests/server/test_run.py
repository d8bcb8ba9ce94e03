"""`serve` as a process: where it listens, what it says, how signals end it, and how it fails to start."""

import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import structlog

from albatross.config import EngineConfig, ServerConfig
from albatross.errors import CheckpointError, ConfigError
from albatross_server.run import address_of, open_listener, serve

PROGRAM = """
import json, os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from fakes import FakeEngine
from albatross.config import EngineConfig, ServerConfig
from albatross_server import run

class Engine(FakeEngine):
    @classmethod
    async def start(cls, config):
        engine = cls(config)
        engine.step_s = 0.02
        return engine

run.EngineClient = Engine
def say(address):
    print(address, flush=True)

run.serve(EngineConfig(), ServerConfig(log_format="json", **json.loads(sys.argv[2])), say)
"""


class Process:
    """A server process on a fake engine, and its log."""

    def __init__(self, **settings: object) -> None:
        fakes = str(Path(__file__).with_name("fakes.py"))
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, fakes, json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[dict[str, object]] = []
        assert self.popen.stdout is not None
        self.address = self.popen.stdout.readline().strip()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.log.append(json.loads(line))

    def wait(self) -> int:
        code = self.popen.wait(20)
        self._reader.join(20)
        return code

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.wait()
        for pipe in (self.popen.stdout, self.popen.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process(port=0)
    yield process
    process.close()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_stream_finish_and_the_process_ends_well(process: Process, sig: signal.Signals) -> None:
    with httpx.stream("POST", f"{process.address}/v1/completions", json={"prompt": "A", "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        process.popen.send_signal(sig)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait() == 0
    assert [line["event"] for line in process.log] == ["loading", "ready", "draining", "request"]
    assert process.popen.stdout is not None
    assert process.popen.stdout.read() == "", "the address was said twice"


def test_a_second_signal_ends_at_once(process: Process) -> None:
    body = {"prompt": "A", "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{process.address}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        while "draining" not in [line["event"] for line in process.log]:
            next(lines)
        process.popen.send_signal(signal.SIGTERM)
        assert '"error"' in [line for line in lines if line][-1]
    assert process.wait() == 0


def test_each_request_leaves_one_line_without_its_prompt(process: Process) -> None:
    httpx.post(f"{process.address}/v1/completions", json={"prompt": "Xyzzy", "user": "Plugh"}, headers={"x-request-id": "r-1"})
    httpx.post(f"{process.address}/v1/completions", json={"prompt": ["Xyzzy"], "stop": {"Xyzzy": 1}})
    process.popen.send_signal(signal.SIGTERM)
    process.wait()
    good, bad = [line for line in process.log if line["event"] == "request"]
    assert (good["request_id"], good["status"], good["prompt_tokens"]) == ("r-1", 200, 3)
    assert (bad["status"], bad["error"]) == (400, "InvalidRequestError")
    assert "Xyzzy" not in json.dumps(process.log)


def test_a_unix_socket_is_served_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    process = Process(uds=str(path))
    try:
        assert process.address == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
            assert client.get("/livez").status_code == 200
        with pytest.raises(ConfigError, match="already listens"):
            open_listener(ServerConfig(uds=str(path)))
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.close()
    assert not path.exists()


def test_a_socket_file_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "stale.sock")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    with open_listener(ServerConfig(uds=path)) as listener:
        assert address_of(listener) == f"unix:{path}"


def test_a_file_in_place_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("keep")
    with pytest.raises(ConfigError, match="Cannot listen on"):
        open_listener(ServerConfig(uds=str(path)))
    assert path.read_text() == "keep"


def test_a_port_in_use_is_one_sentence() -> None:
    with open_listener(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Cannot listen on 127\.0\.0\.1:{port}: .*\. Choose another address\."):
            open_listener(ServerConfig(port=port))


def test_a_host_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"Cannot listen on 203\.0\.113\.1:8000"):
        open_listener(ServerConfig(host="203.0.113.1"))


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Gives this process its logging back after `serve` has set up its own."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


@pytest.mark.usefixtures("own_logging")
def test_a_model_that_does_not_load_ends_serve_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing\.pth"):
        serve(EngineConfig(model=str(tmp_path / "missing.pth")), ServerConfig(port=0, log_level="error"))
