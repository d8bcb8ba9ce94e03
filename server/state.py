"""What all routes of one application share: settings, the engine, the runs under way, and whether new ones are taken.

`drain` is the way out: no new generation, time for the running ones to finish, then an error for those that did not.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator

from albatross import __version__
from albatross.config import EngineConfig, ServerConfig
from albatross.engine.client import EngineClient

from .errors import ENGINE_RETRY_S, ApiError
from .lifecycle import Run
from .metrics import Metrics
from .plan import Context, check_profile
from .responses import make_fingerprint

_LAST_WORDS_S = 2.0  # for writing the error that ends a run which was cut off


class ServerState:
    """One per application. Lives on the event loop's thread alone."""

    def __init__(self, config: ServerConfig, engine_config: EngineConfig, engine: EngineClient) -> None:
        self.config = config
        self.engine_config = engine_config
        self.engine = engine
        self.profile = engine_config.load_profile()
        check_profile(self.profile)
        self.model_name = config.served_model_name or engine_config.model_name
        self.metrics = Metrics(engine)
        self.created = int(time.time())
        self.is_draining = False
        self._runs: set[Run] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._hurry = asyncio.Event()

    @property
    def fingerprint(self) -> str:
        return make_fingerprint(__version__, self.engine.status.info)

    def context(self) -> Context:
        return Context(self.engine.tokenizer, self.profile, self.model_name, self.engine_config.max_num_choices)

    def obstacle(self) -> ApiError | None:
        """Why no generation can start now, as an answer with status 503; None if one can."""
        if self.is_draining:
            message = "The server is shutting down and takes no more requests."
            return ApiError(503, message, code="draining", retry_after_s=self.config.drain_timeout_s)
        status = self.engine.status
        if status.state == "ready":
            return None
        return ApiError(
            503, f"The engine is not ready: {status.reason or status.state}.", code=status.state, retry_after_s=ENGINE_RETRY_S
        )

    @contextlib.contextmanager
    def track(self, run: Run) -> Iterator[None]:
        """Keeps `run` among those that a drain waits for."""
        self._runs.add(run)
        self._is_idle.clear()
        try:
            yield
        finally:
            self._runs.discard(run)
            if not self._runs:
                self._is_idle.set()

    def hurry(self) -> None:
        """Ends a drain's patience."""
        self._hurry.set()

    async def drain(self) -> None:
        """Returns once no generation runs; those that outlast drain_timeout_s, or a call of `hurry`, end with an error."""
        self.is_draining = True
        await _first_of(self._is_idle, self._hurry, timeout_s=self.config.drain_timeout_s)
        for run in self._runs:
            run.interrupt("The server is shutting down; the answer was cut off.")
        await _first_of(self._is_idle, timeout_s=_LAST_WORDS_S)


async def _first_of(*events: asyncio.Event, timeout_s: float) -> None:
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for waiter in waiters:
        waiter.cancel()
