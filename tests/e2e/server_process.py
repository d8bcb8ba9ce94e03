"""A real server on the demo model, as a user starts it."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
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
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (a pipe that nobody reads would stop the server once full)
        self.process = subprocess.Popen(
            [*command, "serve", "--port", str(self.port), *flags],
            stdout=self._log, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env},
        )  # fmt: skip
        self.wait_ready(60)
        self.start_s = time.monotonic() - started

    def wait_ready(self, limit_s: float) -> float:
        """Seconds until /readyz answered 200."""
        started = time.monotonic()
        while time.monotonic() - started < limit_s:
            if self.process.poll() is not None:
                self._log.seek(0)
                raise RuntimeError(f"the server ended with {self.process.returncode}: {self._log.read()}")
            try:
                if httpx.get(self.url + "/readyz", timeout=2).status_code == 200:
                    return time.monotonic() - started
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise TimeoutError(f"the server was not ready within {limit_s} s")

    def engine_pids(self) -> list[int]:
        """The child processes that are engines."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children if "albatross.engine.process" in Path(f"/proc/{child}/cmdline").read_text()]

    def engine_pid(self) -> int:
        """The one that is there with one worker."""
        (pid,) = self.engine_pids()
        return pid

    def stop(self, limit_s: float = 20) -> int:
        """Its exit code after SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(limit_s)
        finally:
            self.process.kill()
            self._log.close()
