"""A real server on the demo model, as a user starts it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

CLI = (sys.executable, "-c", "from albatross.cli.main import main; main()")


class ServerProcess:
    """`albatross serve` on a free port of the loopback address; `start_s` is the time until it was ready."""

    def __init__(self, *flags: str, command: tuple[str, ...] = CLI, **env: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        started = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "serve", "--port", str(self.port), *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env},
        )  # fmt: skip
        self.wait_ready(60)
        self.start_s = time.monotonic() - started

    def wait_ready(self, limit_s: float) -> float:
        """Seconds until /readyz answered 200."""
        started = time.monotonic()
        while time.monotonic() - started < limit_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}: {self.process.communicate()[0]}")
            try:
                if httpx.get(self.url + "/readyz", timeout=2).status_code == 200:
                    return time.monotonic() - started
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise TimeoutError(f"the server was not ready within {limit_s} s")

    def engine_pid(self) -> int:
        """The one child process that is the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [int(child) for child in children if "albatross.engine.process" in Path(f"/proc/{child}/cmdline").read_text()]
        return pid

    def stop(self, limit_s: float = 20) -> int:
        """Its exit code after SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode
