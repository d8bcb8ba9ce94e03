"""What the tests of the whole server share: a server a module."""

from collections.abc import Iterator

import pytest
from server_process import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess()
    yield server
    server.stop()
