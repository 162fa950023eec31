"""Whether there is a GPU is asked of the driver, not of the names of device files."""

import ctypes
from typing import Any

import pytest

from tests import devices


class Driver:
    """CUDA's driver library, of which two functions are called."""

    def __init__(self, count: int, status: int = 0) -> None:
        self.count, self.status = count, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, place: Any) -> int:
        place._obj.value = self.count
        return 0


@pytest.mark.parametrize(
    ("driver", "expected"),
    [(Driver(1), True), (Driver(0), False), (Driver(1, status=100), False), (None, False)],
    ids=["one", "none visible", "no device", "no driver"],
)
def test_the_driver_is_asked(driver: Driver | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert devices.has_cuda.__wrapped__() is expected
