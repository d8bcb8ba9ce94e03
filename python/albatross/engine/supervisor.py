"""Keeps one engine process alive: starts it, carries messages, notices its death or silence, starts it again.

Knows nothing of requests and of other engines; `worker` gets every message and every death through two callbacks on the
event loop.
"""

import asyncio
import contextlib
import itertools
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from albatross import errors
from albatross.config import EngineConfig
from albatross.engine.messages import EngineFailed, EngineReady, EngineStats, Envelope, FromEngine, Shutdown, ToEngine
from albatross.engine.status import State, WorkerStatus
from albatross.errors import AlbatrossError, EngineDeadError

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "albatross.engine.process")
FIRST_DELAY_S = 0.25  # before the first restart; doubles with every failure in a row
LONGEST_DELAY_S = 30.0
WATCH_S = 0.5  # between two looks at the engine's signs of life
LEAVE_S = 5.0  # an engine told to shut down is killed after this
MESSAGES_A_TURN = 16  # taken before other tasks run: a front that lags sends several tokens at once, and so catches up


class Supervisor:
    """One engine process at a time, each with its own epoch; messages of a dead one are dropped."""

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[FromEngine], None],
        on_death: Callable[[str], None],
        command: Sequence[str] = ENGINE_COMMAND,
        worker: int = 0,
    ) -> None:
        """`worker` is the engine's number among `config.workers`."""
        self._config = config
        self._worker = worker
        self._on_message = on_message
        self._on_death = on_death
        self._command = command
        self._encoder = msgspec.msgpack.Encoder()
        self._state: State = "loading"
        self._reason: str | None = "the model is loading"
        self._info: EngineReady | None = None
        self._stats = EngineStats()
        self._restarts = 0
        self._epoch = 0
        self._failure: EngineFailed | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._push: zmq.Socket[bytes] | None = None
        self._last_sign = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def status(self) -> WorkerStatus:
        return WorkerStatus(self._state, self._reason, self._info, self._stats, self._restarts)

    @property
    def is_ready(self) -> bool:
        return self._state == "ready"

    def start(self) -> None:
        """Begins on the running event loop; returns at once."""
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._folder = Path(tempfile.mkdtemp(prefix="albatross-"))
        self._pull = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._pull.bind(self._address("front"))
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._keep_alive())]

    async def wait_ready(self) -> EngineReady:
        """The first engine's description. Raises what kept it from starting."""
        return await asyncio.shield(self._ready)

    def send(self, message: ToEngine) -> None:
        """Raises EngineDeadError if no engine is there to take it."""
        if self._push is None or not self.is_ready:
            raise EngineDeadError(f"The engine is not ready: {self._reason}.")
        try:
            self._push.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError(
                "The engine does not take messages; it is being watched and restarted if it is stuck."
            ) from None

    async def close(self) -> None:
        """Lets the engine leave, kills it if it does not, and removes the sockets. One that still loads is ended at once."""
        is_at_work = self.is_ready
        with contextlib.suppress(EngineDeadError):
            self.send(Shutdown())
        self._state, self._reason = "stopped", "the server is shutting down"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None:
            await self._end_process(self._process, is_at_work)
        self._close_push()
        self._pull.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError("The engine was stopped before it was ready."))
            self._ready.exception()

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder / name}"

    async def _pump(self) -> None:
        decoder = msgspec.msgpack.Decoder(Envelope)
        for count in itertools.count(1):
            envelope = decoder.decode(await self._pull.recv())  # does not yield while messages are waiting
            if envelope.epoch == self._epoch:
                self._last_sign = time.monotonic()
                self._handle(envelope.message)
            if count % MESSAGES_A_TURN == 0:
                await asyncio.sleep(0)

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, EngineFailed):
            self._failure = message
            return
        if isinstance(message, EngineReady):
            self._state, self._reason, self._info = "ready", None, message
            if not self._ready.done():
                self._ready.set_result(message)
        else:
            self._stats = message.stats
        self._on_message(message)

    async def _keep_alive(self) -> None:
        failures = 0
        while True:
            reason = await self._run_once()
            if self._state == "stopped":  # before Python 3.12, wait_for can lose the cancellation that `close` asked for
                return
            was_ready = self._state == "ready"
            failures = 0 if was_ready else failures + 1
            if not self._ready.done():
                self._state, self._reason = "failed", reason
                self._ready.set_exception(self._start_error(reason))
                self._ready.exception()  # read once here, so that nobody waiting for it is no error
                return
            self._state, self._reason = "restarting", reason
            self._restarts += 1
            self._stats = EngineStats()
            self._on_death(reason)
            delay = min(FIRST_DELAY_S * 2**failures, LONGEST_DELAY_S)
            logger.error("worker %d lost its engine: %s; starting it again in %.2f s", self._worker, reason, delay)
            await asyncio.sleep(delay)

    async def _run_once(self) -> str:
        """Starts an engine and returns why it ended."""
        self._epoch += 1
        self._failure = None
        self._close_push()
        push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, 0)
        push.bind(self._address(f"engine-{self._epoch}"))
        self._push = push
        self._last_sign = time.monotonic()
        process = await asyncio.create_subprocess_exec(*self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True)
        self._process = process
        launch = {
            "config": self._config.model_dump(),
            "worker": self._worker,
            "epoch": self._epoch,
            "receive_from": self._address(f"engine-{self._epoch}"),
            "send_to": self._address("front"),
        }
        with contextlib.suppress(ConnectionError):  # it died at once; its exit code says more
            if process.stdin is not None:
                process.stdin.write(msgspec.json.encode(launch) + b"\n")
                await process.stdin.drain()
        verdict = await self._watch(process)
        await asyncio.sleep(0.05)  # its last words may still be in the socket
        return self._failure.message if self._failure is not None else verdict

    async def _watch(self, process: asyncio.subprocess.Process) -> str:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                code = await asyncio.wait_for(process.wait(), WATCH_S)
                return f"the engine process ended with {_exit_text(code)}"
            silence = time.monotonic() - self._last_sign
            limit = self._config.stall_timeout_s if self._state == "ready" else self._config.start_timeout_s
            if silence > limit:
                process.kill()
                await process.wait()
                return f"the engine process gave no sign of life for {silence:.0f} s and was killed"

    async def _end_process(self, process: asyncio.subprocess.Process, is_at_work: bool) -> None:
        if process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        if not is_at_work:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), LEAVE_S)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()

    def _close_push(self) -> None:
        if self._push is not None:
            self._push.close(linger=int(LEAVE_S * 1000) if self._state == "stopped" else 0)
            self._push = None

    def _start_error(self, reason: str) -> AlbatrossError:
        kind = getattr(errors, self._failure.kind, None) if self._failure is not None else None
        if isinstance(kind, type) and issubclass(kind, AlbatrossError):
            return kind(reason)
        return EngineDeadError(f"The engine did not start: {reason}.")


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
