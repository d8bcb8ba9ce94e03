"""A server on a fake engine: as an application for whole answers, and on a real port for everything that streams."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from fakes import FakeEngine

from albatross.config import EngineConfig, ServerConfig
from albatross_server.app import App, create_app
from albatross_server.run import Server, address_of, make_server, open_listener


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> FakeEngine:
    model = str(tmp_path / "gosling.pth")  # a name without a profile beside it, so that the defaults are tested
    return FakeEngine(EngineConfig(model=model, max_prompt_tokens=1000, max_output_tokens=500, max_num_choices=16))


@pytest.fixture
def server_config() -> ServerConfig:
    return ServerConfig(port=0, max_body_bytes=1 << 20, drain_timeout_s=5, keep_alive_s=5)


@pytest.fixture
def app(server_config: ServerConfig, engine: FakeEngine) -> App:
    return create_app(server_config, engine.config, engine)  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def client(app: App) -> AsyncIterator[httpx.AsyncClient]:
    """Speaks to the application without a socket; an exception that leaves the application fails the test."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


@pytest_asyncio.fixture
async def server(app: App) -> AsyncIterator[Server]:
    """The application behind uvicorn, as `serve` runs it, on a free port of the loopback."""
    listener = open_listener(app.state.config)
    server = make_server(app)
    server.address = address_of(listener)  # type: ignore[attr-defined]
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    yield server
    server.should_exit = True
    await asyncio.wait_for(task, 20)


@pytest_asyncio.fixture
async def live(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.address, timeout=20) as client:  # type: ignore[attr-defined]
        yield client


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits until a condition holds, at most a second: the bound of every abort."""

    async def wait(condition: Callable[[], bool]) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_poll(condition), 1)
        assert condition()

    return wait


async def _poll(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)
