"""Whether something fits into a device's memory, asked before it is allocated. Used wherever a model allocates much."""

from pathlib import Path

import torch

from albatross.errors import ConfigError


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
