"""`FaultyDriver`: any driver, with failures, delays and hooks before chosen calls, for tests.

Knows nothing of the driver inside but the contract.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import DriverError
from .base import Copy, Driver, Fence, MemoryInfo

__all__ = ["FaultyDriver"]

_CODES = {
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NOT_READY": 600,
    "CUDA_ERROR_UNKNOWN": 999,
}


class _Fault(NamedTuple):
    first: int
    end: int
    name: str


class FaultyDriver(Driver):
    """Any driver, with failures, delays and hooks before chosen calls.

    It takes batches apart into single calls, so that any handle in the middle can fail. Operations are "reserve",
    "create", "map", "set_access", "unmap", "protect", "release", "copy", "pin" and "unpin"; a run of several handles
    counts as that many maps, each followed by a set_access.

    Parameters
    ----------
    inner : Driver
        Does the work.
    record : bool
        Keep every call in `calls`.

    Attributes
    ----------
    calls : list of (str, tuple)
        Operation and arguments of every call, failed ones included.
    counts : Counter
        Calls of each operation so far.
    on_call : callable, optional
        The calling thread runs it before each operation, with the name and arguments. What it raises, the call raises.
    """

    def __init__(self, inner: Driver, record: bool = True) -> None:
        self.inner = inner
        self.name = inner.name
        self.torch_device = inner.torch_device
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.counts: Counter[str] = Counter()
        self.on_call: Callable[[str, tuple[Any, ...]], None] | None = None
        self._record = record
        self._faults: dict[str, list[_Fault]] = {}
        self._delays: dict[str, float] = {}
        self._lock = threading.Lock()

    def fail(self, op: str, at: int = 1, name: str = "CUDA_ERROR_UNKNOWN", times: int = 1) -> None:
        """Make the `at`-th call of `op` from now on fail, and the `times` - 1 after it."""
        with self._lock:
            first = self.counts[op] + at
            self._faults.setdefault(op, []).append(_Fault(first, first + times, name))

    def delay(self, op: str, seconds: float) -> None:
        """Sleep before every call of `op`; 0 ends that."""
        self._delays[op] = seconds

    def heal(self) -> None:
        """Forget all faults and delays."""
        with self._lock:
            self._faults.clear()
            self._delays.clear()

    def _before(self, op: str, *args: Any) -> None:
        """Count and record the call, then sleep, run the hook and fail, as far as a test asked for it."""
        with self._lock:
            self.counts[op] += 1
            count = self.counts[op]
            if self._record:
                self.calls.append((op, args))
            fault = next((f for f in self._faults.get(op, ()) if f.first <= count < f.end), None)
        if seconds := self._delays.get(op, 0.0):
            time.sleep(seconds)
        if self.on_call is not None:
            self.on_call(op, args)
        if fault is not None:
            code = _CODES.get(fault.name, getattr(errno, fault.name, _CODES["CUDA_ERROR_UNKNOWN"]))
            raise DriverError(op, code, fault.name, f"injected into call {count}")

    @property
    def granularity(self) -> int:
        return self.inner.granularity

    def reserve(self, num_bytes: int) -> int:
        self._before("reserve", num_bytes)
        return self.inner.reserve(num_bytes)

    def free_reservation(self, address: int, num_bytes: int) -> None:
        self.inner.free_reservation(address, num_bytes)

    def create(self, num_bytes: int) -> int:
        self._before("create", num_bytes)
        return self.inner.create(num_bytes)

    def release(self, handle: int) -> None:
        self._before("release", handle)
        self.inner.release(handle)

    def map_run(self, address: int, handles: Sequence[int], handle_bytes: int) -> None:
        done = 0
        try:
            for handle in handles:
                at = address + done * handle_bytes
                self._before("map", at, handle, handle_bytes)
                self.inner.map_run(at, (handle,), handle_bytes)
                done += 1
                self._before("set_access", at, handle_bytes)
        except BaseException:
            if done:
                self.inner.unmap_run(address, done * handle_bytes)
            raise

    def unmap_run(self, address: int, num_bytes: int) -> None:
        self._before("unmap", address, num_bytes)
        self.inner.unmap_run(address, num_bytes)

    @property
    def can_protect(self) -> bool:
        return self.inner.can_protect

    def protect(self, address: int, num_bytes: int, *, writable: bool) -> None:
        self._before("protect", address, num_bytes, writable)
        self.inner.protect(address, num_bytes, writable=writable)

    def record_fence(self) -> Fence:
        return self.inner.record_fence()

    def fence_done(self, fence: Fence) -> bool:
        return self.inner.fence_done(fence)

    def wait_fence(self, fence: Fence, timeout_s: float) -> bool:
        return self.inner.wait_fence(fence, timeout_s)

    def order_after(self, fence: Fence) -> None:
        self.inner.order_after(fence)

    def copy_batch(self, copies: Sequence[Copy]) -> Fence:
        for copy in copies:
            self._before("copy", *copy)
        return self.inner.copy_batch(copies)

    def copy_seconds(self, fence: Fence) -> float | None:
        return self.inner.copy_seconds(fence)

    def pin(self, address: int, num_bytes: int) -> None:
        self._before("pin", address, num_bytes)
        self.inner.pin(address, num_bytes)

    def unpin(self, address: int, num_bytes: int) -> None:
        self._before("unpin", address, num_bytes)
        self.inner.unpin(address, num_bytes)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def memory_info(self) -> MemoryInfo:
        return self.inner.memory_info()

    def relieve_pressure(self) -> bool:
        return self.inner.relieve_pressure()

    def bind_thread(self) -> None:
        self.inner.bind_thread()

    def close(self) -> None:
        self.inner.close()
