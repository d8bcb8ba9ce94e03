"""One generation under way, seen from HTTP: who may end it early, when its tokens came, and how it is reported.

Knows nothing of bodies and chunks. Made by the generation routes, followed by `collecting` and `streaming`.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from http import HTTPStatus
from time import perf_counter

from starlette.types import Receive

from albatross.engine.client import Choice, Generation

from .asgi import ClientDisconnected
from .errors import ENGINE_RETRY_S, ApiError
from .plan import Plan


class Run:
    """`halt` is the reason to stop before the end: whoever follows the generation raises it as soon as it is set."""

    def __init__(self, plan: Plan, generation: Generation) -> None:
        self.plan = plan
        self.generation = generation
        self.halt: Exception | None = None
        self.accepted_at = perf_counter()
        self.first_token_at: float | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.generation.choices)

    def interrupt(self, message: str) -> None:
        self._stop(ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="draining", retry_after_s=ENGINE_RETRY_S))

    def mark_first_token(self) -> None:
        self.first_token_at = perf_counter()

    def failure_of(self, choice: Choice) -> ApiError:
        """The answer for a choice that ended with "error" or "abort"."""
        message = choice.error or "The request was aborted before its end."
        if choice.is_lost:
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="engine_unavailable", retry_after_s=ENGINE_RETRY_S)
        return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="generation_failed")

    @contextlib.contextmanager
    def watch(self, receive: Receive) -> Iterator[None]:
        """While the block runs, the client's leaving aborts the generation."""
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            yield
        finally:
            watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stop(ClientDisconnected())

    def _stop(self, reason: Exception) -> None:
        if self.halt is None:
            self.halt = reason
        self.generation.abort()
        self.generation.wake()
