"""What the tests of the whole server share: a server a module, and the evaluation set."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def evaluation() -> list[dict[str, Any]]:
    """480 questions with the greedy text of the float32 reference."""
    return [json.loads(line) for line in (DATA / "eval-11.jsonl").read_text().splitlines()]
