"""The ASGI application: the two generation routes by hand, FastAPI for every other path, one error body for all.

`create_app` is its only entry. It starts nothing: the engine client is given, and its owner closes it.
"""

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albatross import __version__
from albatross.config import EngineConfig, ServerConfig
from albatross.engine.client import EngineClient
from albatross.errors import AlbatrossError

from .asgi import JSON_TYPE, request_id_of, route_path
from .errors import to_api_error, unknown_path, wrong_method
from .openapi import install_openapi
from .routes.generation import GenerationRoute
from .routes.health import health_router
from .routes.metrics import metrics_router
from .routes.models import models_router
from .state import ServerState

_READ_METHODS = "GET, HEAD, OPTIONS"  # of every path that FastAPI serves


class App:
    """Outermost ASGI application. Nothing wraps `send` on its way to a generation route."""

    def __init__(self, state: ServerState, generation: tuple[GenerationRoute, ...], others: ASGIApp) -> None:
        self.state = state
        self._generation = {route.path: route for route in generation}
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        route = self._generation.get(route_path(scope))
        if route is not None:
            await route(scope, receive, send)
            return
        request_id = request_id_of(scope)
        is_head = scope["method"] == "HEAD"

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            elif is_head:
                message["body"] = b""
            await send(message)

        # Every path that answers GET answers HEAD alike, without the body.
        method = "GET" if is_head else scope["method"]
        await self._others({**scope, "method": method, "request_id": request_id}, receive, send_on)


def create_app(config: ServerConfig, engine_config: EngineConfig, engine: EngineClient) -> App:
    """Raises ConfigError if the model's profile is wrong."""
    state = ServerState(config, engine_config, engine)
    fastapi = FastAPI(
        title="Albatross",
        version=__version__,
        description="RWKV-7 language models behind the OpenAI API.",
        redoc_url=None,
        redirect_slashes=False,
    )
    for router in (health_router(state), models_router(state), metrics_router(state)):
        fastapi.include_router(router)
    for kind in (AlbatrossError, HTTPException, RequestValidationError, Exception):
        fastapi.add_exception_handler(kind, _answer_error)
    install_openapi(fastapi)
    chat = GenerationRoute(state, "chat", "/v1/chat/completions")
    completion = GenerationRoute(state, "completion", "/v1/completions")
    return App(state, (chat, completion), fastapi)


async def _answer_error(request: Request, error: Exception) -> Response:
    path = route_path(request.scope)
    answer = to_api_error(error, request.scope["request_id"])
    if isinstance(error, HTTPException) and error.status_code == 404:
        answer = unknown_path(path)
    elif isinstance(error, HTTPException) and error.status_code == 405:
        answer = wrong_method(request.method, path, _READ_METHODS)
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"allow": _READ_METHODS})
    response = Response(answer.body(), answer.status)
    response.raw_headers += [JSON_TYPE, *answer.headers()]
    return response
