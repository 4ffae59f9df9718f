"""`CopyMeter`: how fast rows go to host memory and back. Knows fences and numbers only."""

from __future__ import annotations

from collections import deque

from ..vmm.base import Driver, Fence

__all__ = ["CopyMeter"]


class CopyMeter:
    """How fast rows are copied, out and in together, by the driver's own timing. Lock held.

    Parameters
    ----------
    driver : Driver
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._running: deque[tuple[Fence, int]] = deque(maxlen=64)
        self._num_bytes = 0
        self._seconds = 0.0

    def note(self, fence: Fence, num_bytes: int) -> None:
        """Note copies that were queued."""
        self._running.append((fence, num_bytes))

    @property
    def bytes_per_s(self) -> float:
        """Over all copies that are done; 0 while there are none."""
        while self._running:
            fence, num_bytes = self._running[0]
            seconds = self._driver.copy_seconds(fence)
            if seconds is None:
                break
            self._running.popleft()
            self._num_bytes += num_bytes
            self._seconds += seconds
        return self._num_bytes / self._seconds if self._seconds else 0.0
