"""How long a call waits for anybody, and what it does when the device is short of memory: once, for all of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import DriverError
from ..vmm.base import Driver

__all__ = ["TIMEOUT_S", "again_under_pressure"]

TIMEOUT_S = 4.0
"""The longest that a call waits for another thread's driver calls, for a thread's end, or for work of the device."""

T = TypeVar("T")


def again_under_pressure(driver: Driver, call: Callable[[], T]) -> T:
    """Make a driver call; where the device has no memory for it, ask its other users once to make room, and repeat.

    Raises
    ------
    DriverError
        The driver failed, the second time if there was one.
    """
    try:
        return call()
    except DriverError as error:
        if error.left_behind or not error.out_of_memory or not driver.relieve_pressure():
            raise
        return call()
