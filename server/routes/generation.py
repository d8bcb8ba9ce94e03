"""POST /v1/chat/completions and /v1/completions as raw ASGI handlers, outside FastAPI's layers: the server's hot path.

Body in, plan, generation, answer out, streamed or whole; every failure becomes an OpenAI error body, or the last event
of a stream that has begun.
"""

import asyncio
import re
from time import perf_counter
from typing import Any

import orjson
import structlog
from starlette.types import Receive, Scope, Send

from albatross.errors import AlbatrossError, InvalidRequestError

from ..asgi import JSON_TYPE, ClientDisconnected, Headers, header, read_body, request_id_of, send_whole
from ..chunks import error_event
from ..collecting import collect
from ..errors import to_api_error, wrong_method
from ..lifecycle import Run
from ..plan import Kind, Plan, to_plan
from ..requests import parse_json
from ..responses import make_meta, whole_answer
from ..state import ServerState
from ..streaming import stream

log = structlog.get_logger("albatross.server")
_LARGE_BODY_BYTES = 1 << 16  # beyond it, reading and tokenising take milliseconds and leave the event loop
_LARGE_ANSWER_TOKENS = 4096  # scored tokens of prompts, of which the same is true
_CLIENT_GONE = 499
_METHODS = "POST, OPTIONS"
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\-]")


class GenerationRoute:
    """One of the two routes. An ASGI application that takes requests of its own path only."""

    def __init__(self, state: ServerState, kind: Kind, path: str) -> None:
        self.kind: Kind = kind
        self.path = path
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(self._state, self.path, request_id_of(scope), send)
        try:
            if scope["method"] == "OPTIONS":
                await send_whole(send, 204, b"", exchange.headers([(b"allow", _METHODS.encode())]))
                return
            if scope["method"] != "POST":
                raise wrong_method(scope["method"], self.path, _METHODS)
            await self._serve(scope, receive, exchange)
            exchange.report(200)
        except ClientDisconnected:
            exchange.report(_CLIENT_GONE)
        except Exception as error:
            await exchange.fail(error)

    async def _serve(self, scope: Scope, receive: Receive, exchange: "_Exchange") -> None:
        state = self._state
        _check_content_type(scope)
        if (obstacle := state.obstacle()) is not None:
            raise obstacle
        body = await read_body(scope, receive, state.config.max_body_bytes)
        plan = await asyncio.to_thread(self._plan, body) if len(body) > _LARGE_BODY_BYTES else self._plan(body)
        exchange.request_id = plan.request_id or exchange.request_id
        if (obstacle := state.obstacle()) is not None:
            raise obstacle
        generation = state.engine.generate(
            plan.prompts, plan.params, n=plan.n, stop=plan.stop, include_stop=plan.include_stop, priority=plan.priority
        )
        with generation:
            exchange.run = run = Run(plan, generation)
            with state.track(run), run.watch(receive):
                await self._answer(run, exchange)

    def _plan(self, body: bytes) -> Plan:
        return to_plan(self.kind, parse_json(body), self._state.context())

    async def _answer(self, run: Run, exchange: "_Exchange") -> None:
        state, plan = self._state, run.plan
        tokenizer = state.engine.tokenizer
        meta = make_meta(self.kind, state.model_name, state.fingerprint, exchange.request_id)
        if plan.stream:
            exchange.has_begun = True
            await stream(run, meta, tokenizer, exchange.send, exchange.headers(), state.config.keep_alive_s)
            return
        choices = await collect(run)

        def render() -> bytes:
            return orjson.dumps(whole_answer(plan, meta, choices, tokenizer))

        body = await asyncio.to_thread(render) if plan.num_scored_tokens > _LARGE_ANSWER_TOKENS else render()
        exchange.has_begun = True
        await send_whole(exchange.send, 200, body, exchange.headers([JSON_TYPE]))


class _Exchange:
    """One request and its answer: its id, how far the answer is, and the one line and the metrics it leaves behind."""

    def __init__(self, state: ServerState, route: str, request_id: str, send: Send) -> None:
        self.request_id = request_id
        self.send = send
        self.run: Run | None = None
        self.has_begun = False  # whether the status line may be on its way
        self._route = route
        self._state = state
        self._began_at = perf_counter()

    def headers(self, more: Headers = ()) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", self.request_id.encode()), *more]
        if self.run is not None and self.run.plan.ignored:
            headers.append((b"x-ignored-params", _header_list(self.run.plan.ignored)))
        return headers

    async def fail(self, error: Exception) -> None:
        """Answers with `error`, or ends the stream with it; a stream that ends so has no [DONE]."""
        answer = to_api_error(error, self.request_id)
        self.report(answer.status, error)
        if not self.has_begun:
            await send_whole(self.send, answer.status, answer.body(), self.headers([JSON_TYPE, *answer.headers()]))
        elif self.run is not None and self.run.plan.stream:
            await self.send({"type": "http.response.body", "body": error_event(answer.body())})
        else:
            raise error

    def report(self, status: int, error: Exception | None = None) -> None:
        """Metrics and one log line. Prompts and answers are never logged."""
        self._state.metrics.answers.labels(self._route, str(status)).inc()
        facts: dict[str, Any] = {"request_id": self.request_id, "route": self._route, "status": status}
        facts["duration_s"] = round(perf_counter() - self._began_at, 4)
        if self.run is not None:
            facts |= self._state.metrics.observe(self.run)
        if error is not None:
            facts["error"] = type(error).__name__
        if error is None or isinstance(error, AlbatrossError):
            log.info("request", **facts)
        else:
            log.error("request", **facts, exc_info=error)


def _check_content_type(scope: Scope) -> None:
    given = header(scope, b"content-type")
    if given is None:
        return
    media_type = given.partition(b";")[0].strip().lower()
    if media_type != b"application/json" and not (media_type.startswith(b"application/") and media_type.endswith(b"+json")):
        found = media_type[:80].decode("latin-1")
        raise InvalidRequestError(f"Content-Type must be application/json, but is {found!r}.", code="unsupported_content_type")


def _header_list(names: tuple[str, ...]) -> bytes:
    """Field names as a header value; whatever a header cannot hold is shown as a question mark."""
    return ", ".join(_UNPRINTABLE.sub("?", name[:64]) for name in names[:32]).encode()
