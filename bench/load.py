"""Many streaming completions at once over plain sockets: what a client costs must not limit what is measured.

One thread, one selector, bytes counted and not parsed; tokens are what the server's own usage chunk says. Called by the
benchmarks of the server.
"""

import json
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.request import urlopen

HOST = "127.0.0.1"
_EVENT = b"data:"
_DONE = b"[DONE]"
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_OK = b"HTTP/1.1 200 "
_TAIL_BYTES = 1024  # of each stream, enough for the usage chunk and [DONE]
_SILENCE_S = 120
_READ_BYTES = 1 << 16
# Between two looks at all sockets. A client woken for each single event would take from the server what a client on another
# machine does not; times are known to this much.
_POLL_S = 0.002


@dataclass
class Stream:
    """One request and what its client has seen of the answer."""

    sent_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    num_events: int = 0
    tail: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Raises ValueError if the answer is not a whole stream."""
        usage = _USAGE.findall(self.tail)
        if not usage or _DONE not in self.tail:
            raise ValueError(f"A stream ended without usage and [DONE], but with {self.tail[-300:]!r}.")
        return int(usage[-1])


@dataclass
class LoadReport:
    """All streams of one load, and every gap between two reads of the same stream, in seconds."""

    streams: list[Stream] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def num_events(self) -> int:
        return sum(stream.num_events for stream in self.streams)

    @property
    def total_s(self) -> float:
        """From the first request to the last byte."""
        return max(stream.last_at for stream in self.streams) - min(stream.sent_at for stream in self.streams)

    @property
    def delivery_s(self) -> float:
        """From the first byte of any answer to the last byte."""
        return max(stream.last_at for stream in self.streams) - min(stream.first_at for stream in self.streams)


def run_load(port: int, bodies: Sequence[dict[str, Any]]) -> LoadReport:
    """Sends one streaming completion a body, all at once, and reads them to their ends."""
    report = LoadReport()
    with selectors.DefaultSelector() as selector:
        connections = [socket.create_connection((HOST, port)) for _ in bodies]
        for connection, body in zip(connections, bodies, strict=True):
            report.streams.append(Stream(time.perf_counter()))
            connection.sendall(_request(body))
            selector.register(connection, selectors.EVENT_READ, report.streams[-1])
        _read_all(selector, report)
        for connection in connections:
            connection.close()
    return report


def _read_all(selector: selectors.BaseSelector, report: LoadReport) -> None:
    num_open = len(report.streams)
    while num_open:
        ready = selector.select(_SILENCE_S)
        if not ready:
            raise RuntimeError(f"{num_open} streams have been silent for {_SILENCE_S} s.")
        for key, _ in ready:
            data = key.fileobj.recv(_READ_BYTES)  # type: ignore[union-attr]
            at = time.perf_counter()
            stream: Stream = key.data
            if not stream.tail and not data.startswith(_OK):
                raise RuntimeError(f"A request was refused: {data[:600]!r}")
            num_events = (stream.tail[1 - len(_EVENT) :] + data).count(_EVENT)
            if num_events:
                _note_events(report, stream, num_events, at)
            stream.tail = (stream.tail + data)[-_TAIL_BYTES:]
            if not data or _DONE in stream.tail:
                selector.unregister(key.fileobj)
                num_open -= 1
        time.sleep(_POLL_S)


def _note_events(report: LoadReport, stream: Stream, num_events: int, at: float) -> None:
    if stream.num_events:
        report.gaps.append(at - stream.last_at)
    else:
        stream.first_at = at
    stream.num_events += num_events
    stream.last_at = at


def _request(body: dict[str, Any]) -> bytes:
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = ("POST /v1/completions HTTP/1.1", f"Host: {HOST}", "Content-Type: application/json", f"Content-Length: {len(payload)}")
    return "\r\n".join([*head, "", ""]).encode() + payload


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running_server(*python_arguments: str, ready_s: float = 120) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A Python process that is given a free --port: yields it and the port once /readyz says 200, and ends it."""
    port = free_port()
    process = subprocess.Popen([sys.executable, *python_arguments, "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        _wait_ready(process, port, time.monotonic() + ready_s)
        yield process, port
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"The server left with exit code {process.returncode} before it was ready.")
        try:
            with urlopen(f"http://{HOST}:{port}/readyz", timeout=5):
                return
        except OSError:  # not listening yet, or 503
            time.sleep(0.1)
    raise RuntimeError("The server was not ready in time.")
