"""What the NVIDIA driver says of itself and its cards, asked through ctypes.

Knows nothing of torch, so that a report or a refusal needs neither torch nor a working CUDA runtime. Allocates nothing on
a card. Called by `_loader` and by `albatross doctor`; `_selection` judges its cards.
"""

import ctypes
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*, from the driver API reference


@dataclass(frozen=True, slots=True)
class Card:
    """One visible GPU. `index` is the one torch uses; `capability` is (major, minor)."""

    index: int
    name: str
    capability: tuple[int, int]

    @property
    def sm(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.sm})"


def open_driver() -> ctypes.CDLL | None:
    """The driver's library, or None where there is no NVIDIA driver."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def supported_cuda(driver: ctypes.CDLL | None) -> tuple[int, int] | None:
    """The newest CUDA version the driver can run, as (major, minor)."""
    number = ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def list_cards(driver: ctypes.CDLL | None) -> tuple[Card, ...]:
    """All GPUs the driver shows to this process; none where it does not start (no card, or CUDA_VISIBLE_DEVICES is empty)."""
    count = ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_card(driver, index) for index in range(count.value))


def _card(driver: ctypes.CDLL, index: int) -> Card:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Card(index, name.value.decode(errors="replace"), (major.value, minor.value))


def driver_release() -> str | None:
    """The driver's own version, such as "580.159.03", where the kernel module tells it (Linux)."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found.group() if found else None
