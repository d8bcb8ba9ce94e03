"""Runs the server: its engine processes, one uvicorn with uvloop and httptools, until a signal ends all.

SIGTERM or SIGINT begins a drain: no new generation, time for the running ones; a second signal ends it at once. Called
by the command line; `serve` raises an AlbatrossError whose text says why the server could not start.
"""

import asyncio
import contextlib
import errno
import importlib.util
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import uvicorn

from albatross.config import EngineConfig, ServerConfig
from albatross.engine.client import EngineClient
from albatross.errors import AlbatrossError, ConfigError

from .app import App, create_app
from .logs import configure_logging
from .state import ServerState

log = structlog.get_logger("albatross.server")
_BACKLOG = 2048
_IDLE_CONNECTION_S = 60
_CLOSING_S = 5  # for the connections that a finished drain leaves open


def serve(engine_config: EngineConfig, config: ServerConfig, on_ready: Callable[[str], None] = lambda address: None) -> None:
    """Returns after a drain. `on_ready` gets "http://host:port" or "unix:path" once the model is loaded.

    Raises AlbatrossError if the address is taken, the model does not load, or the engine fails.
    """
    configure_logging(config.log_level, config.log_format)
    listener = open_listener(config)
    try:
        _run(_serve(engine_config, config, listener, on_ready))
    finally:
        listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


def open_listener(config: ServerConfig) -> socket.socket:
    """A bound socket. Raises ConfigError if the address is taken or cannot be had."""
    try:
        return _bind_unix(config.uds) if config.uds is not None else _bind_tcp(config.host, config.port)
    except OSError as error:
        where = config.uds or f"{config.host}:{config.port}"
        raise ConfigError(f"Cannot listen on {where}: {error.strerror or error}. Choose another address.") from None


def address_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"http://{host}:{name[1]}"


class Server(uvicorn.Server):
    """Uvicorn whose signals drain the application first, with the port still open, so that probes and clients hear why."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A signal handler may run between any two bytecodes; the event loop is the place to act.
        self._loop.call_soon_threadsafe(self.begin_drain)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def begin_drain(self) -> None:
        """The first call drains and then stops the server, any other one ends the drain's patience."""
        if self._draining is not None:
            self._state.hurry()
            return
        log.info("draining", timeout_s=self._state.config.drain_timeout_s)
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._state.drain()
        self.should_exit = True


def make_server(app: App) -> Server:
    config = app.state.config
    return Server(
        uvicorn.Config(
            app,
            http=_http_protocol(),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            root_path=config.root_path,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=_CLOSING_S,
        ),
        app.state,
    )


async def _serve(
    engine_config: EngineConfig, config: ServerConfig, listener: socket.socket, on_ready: Callable[[str], None]
) -> None:
    engine = await EngineClient.start(engine_config)
    try:
        server = make_server(create_app(config, engine_config, engine))
        announcement = asyncio.ensure_future(_announce(engine, server, address_of(listener), on_ready))
        await server.serve(sockets=[listener])
        announcement.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcement
    finally:
        await engine.close()


async def _announce(engine: EngineClient, server: Server, address: str, on_ready: Callable[[str], None]) -> None:
    """Says where the server is once the model is loaded; stops the server if it does not load."""
    log.info("loading", model=engine.config.model, address=address)
    try:
        info = await engine.wait_ready()
    except AlbatrossError:
        server.should_exit = True
        raise
    log.info(
        "ready", address=address, model=info.model_name, device=info.device, dtype=info.dtype, backend=info.backend,
        slots=info.num_slots, workers=engine.config.workers, load_s=round(info.load_s, 2),
    )  # fmt: skip
    on_ready(address)


def _bind_tcp(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def _bind_unix(path: str) -> socket.socket:
    """Takes the place of a socket file that nobody listens on any more."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.connect(path)
            raise OSError(errno.EADDRINUSE, "a server already listens there")
        if Path(path).is_socket():
            Path(path).unlink()
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _http_protocol() -> Any:
    if not _has("httptools"):
        return "h11"
    from .protocol import JsonErrorProtocol

    return JsonErrorProtocol


def _run(main: Coroutine[Any, Any, None]) -> None:
    if _has("uvloop"):
        import uvloop

        uvloop.run(main)
    else:
        asyncio.run(main)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
