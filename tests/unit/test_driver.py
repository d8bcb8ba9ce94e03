"""What is asked of the NVIDIA driver, against a stand-in for its library."""

import ctypes
from typing import Any

from albatross.ops import _driver
from albatross.ops._driver import Card


class FakeDriver:
    """Answers as libcuda does, for two cards and a given version."""

    def __init__(self, version: int = 13000, start: int = 0) -> None:
        self.version, self.start = version, start

    def cuInit(self, flags: int) -> int:
        return self.start

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = 2
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: ctypes.c_int) -> int:
        name.value = b"Card %d" % device.value
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: ctypes.c_int) -> int:
        out._obj.value = {75: 12, 76: device.value}[attribute]
        return 0


def test_the_driver_is_asked_for_its_cuda_version_and_its_cards() -> None:
    driver: Any = FakeDriver(version=12080)
    assert _driver.supported_cuda(driver) == (12, 8)
    assert _driver.list_cards(driver) == (Card(0, "Card 0", (12, 0)), Card(1, "Card 1", (12, 1)))


def test_a_card_is_named_by_number_name_and_architecture() -> None:
    assert str(Card(1, "Card 1", (12, 1))) == "GPU 1 (Card 1, sm_121)"


def test_a_driver_that_shows_no_card_gives_none() -> None:
    driver: Any = FakeDriver(start=100)  # CUDA_ERROR_NO_DEVICE
    assert _driver.list_cards(driver) == ()


def test_a_machine_without_a_driver_has_no_version_and_no_cards() -> None:
    assert _driver.supported_cuda(None) is None
    assert _driver.list_cards(None) == ()
