"""A lock that lets one process at a time build in a folder, tells the others who has it, and ends with its owner.

The operating system drops the lock when its owner dies, however that happens, so none is ever stale; the file only says who
has it, and stays. Knows nothing of what is built. Called by `jit` and `albatross build`.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from albatross.build.toolchain import BuildError

TIMEOUT_S = 1800.0  # ten times what all architectures take on two cores
_POLL_S = 0.1


@contextmanager
def build_lock(path: Path, on_wait: Callable[[str], None], timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Hold the lock file within the block. `on_wait` hears once whom it waits for.

    Raises BuildError if the owner still has it after `timeout_s`, and OSError where the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _acquire(descriptor, path, on_wait, timeout_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, on_wait: Callable[[str], None], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    is_waiting = False
    while not _try(descriptor):
        if time.monotonic() >= end:
            raise BuildError(
                f"Waited {timeout_s:g} s for {owner(path)}, which builds in {path.parent}: wait for it, or end it, and try again."
            )
        if not is_waiting:
            on_wait(f"Waiting for {owner(path)}, which builds in {path.parent}.")
            is_waiting = True
        time.sleep(_POLL_S)


def _try(descriptor: int) -> bool:
    import fcntl  # only the systems that the library is built on have it

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def owner(path: Path) -> str:
    """Who has the lock, or had it last, for a sentence: "process 123 on host"."""
    try:
        content = json.loads(path.read_bytes())
        return f"process {content['pid']} on {content['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # it has the lock since a moment and has not said yet who it is
