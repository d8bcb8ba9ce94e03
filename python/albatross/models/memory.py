"""Whether something fits into a device's memory, asked before it is allocated or found out on the way; either way the user
reads what was needed, what is free and what to do. Used wherever a model or an engine allocates much."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from albatross.errors import ConfigError

T = TypeVar("T")


def within_memory(make: Callable[[], T], device: torch.device, purpose: str, advice: str) -> T:
    """What `make` returns. Raises ConfigError if the device's memory runs out in it, and has then given back what it took."""
    free = _free_bytes(device)
    try:
        return make()
    except RuntimeError as error:
        if free is None or not is_out_of_memory(error):
            raise
    # Outside the handler: the frames of the error hold what was allocated.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    raise ConfigError(f"{purpose} needs more than the {free / 2**30:.2f} GiB of memory that are free on {device}: {advice}.")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, said by torch's allocator, by a library it calls, or while another error was handled."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError) or "out of memory" in str(cause) or "ALLOC_FAILED" in str(cause):
            return True
        cause = cause.__context__
    return False


def require_free(needed_bytes: int, device: torch.device, purpose: str, advice: str) -> None:
    """Raises ConfigError naming the memory needed and the memory free, if the first is more than the second."""
    free = _free_bytes(device)
    if free is not None and needed_bytes > free:
        raise ConfigError(
            f"{purpose} needs {needed_bytes / 2**30:.2f} GiB of memory on {device}, "
            f"where {free / 2**30:.2f} GiB are free: {advice}."
        )


def _free_bytes(device: torch.device) -> int | None:
    """Memory that can be allocated on `device`; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
