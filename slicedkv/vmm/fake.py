"""`FakeDriver`: books of any size without any memory, for tests and for planning.

No memory lies behind its addresses, so its tensors are on torch's "meta" device: shapes, strides and offsets are
right, values are not there.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Any

from ..errors import DriverError
from ..layout import align_up
from .base import Copy, MemoryInfo
from .ledger import Mappings
from .strict import Outcome, StrictDriver

__all__ = ["FakeDriver", "FakeFence"]

_INVALID_VALUE, _OUT_OF_MEMORY = 1, 2
_NAMES = {_INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE", _OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY"}
_FIRST_ADDRESS = 2**40


class FakeFence:
    """A fence of `FakeDriver`.

    Attributes
    ----------
    done : bool
    thread : int
        Identifier of the thread that recorded it.
    device, stream : object
        What was current then.
    num_bytes : int
        What its `copy_batch` copied, 0 for other fences.
    """

    def __init__(self, done: bool, device: object, stream: object, num_bytes: int = 0) -> None:
        self.done = done
        self.num_bytes = num_bytes
        self.thread = threading.get_ident()
        self.device = device
        self.stream = stream


class FakeDriver(StrictDriver):
    """Virtual memory of any size, without any memory. All verbs are thread-safe.

    Parameters
    ----------
    granularity, total_bytes : int
        In bytes; creating more than `total_bytes` fails as on a GPU.
    device : str
        torch device of its tensors.

    Attributes
    ----------
    hold_fences : bool
        While True, new fences stay undone until `finish_fences`.
    current_device, current_stream : object
        Each new fence notes them. A test sets them as it needs.
    fences : list of FakeFence
        All fences recorded.
    ordered : list of (object, FakeFence)
        The stream of each `order_after`, and its fence.
    copies : list of Copy
        All copies asked for. The driver makes none.
    copy_bytes_per_s : float
        The speed that `copy_seconds` tells.
    pinned : dict of int to int
        Bytes of host memory pinned, by address.
    bound_threads : set of int
        Threads that called `bind_thread`.
    protected : set of int
        Addresses that are read-only, one for every `granularity` bytes.
    """

    name = "fake"
    can_protect = True

    def __init__(self, granularity: int = 2 * 2**20, total_bytes: int = 64 * 2**30, device: str = "meta") -> None:
        super().__init__(granularity, (_INVALID_VALUE, _NAMES[_INVALID_VALUE]))
        self.torch_device = device
        self.total_bytes = total_bytes
        self.hold_fences = False
        self.current_device: object = None
        self.current_stream: object = None
        self.fences: list[FakeFence] = []
        self.ordered: list[tuple[object, FakeFence]] = []
        self.bound_threads: set[int] = set()
        self.copies: list[Copy] = []
        self.copy_bytes_per_s = 50e9
        self.pinned: dict[int, int] = {}
        self.protected: set[int] = set()
        self._next_address = align_up(_FIRST_ADDRESS, granularity)
        self._next_handle = 1
        self._fences_changed = threading.Condition()

    @property
    def reserved(self) -> int:
        """Bytes of address space reserved."""
        return self._ledger.reserved_bytes

    @property
    def created_bytes(self) -> int:
        """Bytes of physical memory behind all handles."""
        return self._ledger.created_bytes

    @property
    def mapped(self) -> int:
        """Mappings, aliases counted each."""
        return self._ledger.mapped_count

    def memory_info(self) -> MemoryInfo:
        self._enter()
        return MemoryInfo(self.total_bytes - self.created_bytes, self.total_bytes)

    def bind_thread(self) -> None:
        self._enter()
        self.bound_threads.add(threading.get_ident())

    def _reserve(self, num_bytes: int) -> int:
        address = self._next_address
        self._next_address += num_bytes + self._granularity  # a gap, so that runs over an end are seen
        return address

    def _free(self, address: int, num_bytes: int) -> None:
        pass

    def _create(self, num_bytes: int, handles: array[int]) -> Outcome:
        fitting = max(0, (self.total_bytes - self.created_bytes) // num_bytes)
        done = min(len(handles), fitting)
        for index in range(done):
            handles[index] = self._next_handle + index
        self._next_handle += done
        return done, 0 if done == len(handles) else _OUT_OF_MEMORY, "create"

    def _release(self, handles: array[int], sizes: array[int]) -> Outcome:
        return len(handles), 0, ""

    def _map(self, mappings: Mappings) -> Outcome:
        return len(mappings.addresses), 0, ""

    def _unmap(self, addresses: array[int], sizes: array[int]) -> Outcome:
        for address, size in zip(addresses, sizes, strict=True) if self.protected else ():
            self.protected.difference_update(range(address, address + size, self._granularity))
        return len(addresses), 0, ""

    def _protect(self, address: int, num_bytes: int, *, writable: bool) -> int:
        change = self.protected.difference_update if writable else self.protected.update
        change(range(address, address + num_bytes, self._granularity))
        return 0

    def _error(self, op: str, code: int) -> DriverError:
        return DriverError(op, code, _NAMES[code])

    # --- fences, under the test's control --------------------------------------------------------------------------

    def record_fence(self) -> FakeFence:
        self._enter()
        return self._record(0)

    def _record(self, num_bytes: int) -> FakeFence:
        fence = FakeFence(not self.hold_fences, self.current_device, self.current_stream, num_bytes)
        self.fences.append(fence)
        return fence

    def copy_batch(self, copies: Sequence[Copy]) -> FakeFence:
        self._enter()
        self.copies.extend(copies)
        return self._record(sum(copy.num_bytes for copy in copies))

    def copy_seconds(self, fence: Any) -> float | None:
        return fence.num_bytes / self.copy_bytes_per_s if fence.done else None

    def pin(self, address: int, num_bytes: int) -> None:
        self._enter()
        self.pinned[address] = num_bytes

    def unpin(self, address: int, num_bytes: int) -> None:
        self._enter()
        if self.pinned.pop(address, None) != num_bytes:
            raise self._ledger.breach("unpin", f"{num_bytes} bytes at {address:#x} are not pinned")

    def finish_fences(self) -> None:
        """All work submitted so far is done now."""
        with self._fences_changed:
            for fence in self.fences:
                fence.done = True
            self._fences_changed.notify_all()

    def fence_done(self, fence: Any) -> bool:
        self._enter()
        return bool(fence.done)

    def wait_fence(self, fence: Any, timeout_s: float) -> bool:
        self._enter()
        with self._fences_changed:
            return self._fences_changed.wait_for(lambda: bool(fence.done), timeout_s)

    def order_after(self, fence: Any) -> None:
        self._enter()
        self.ordered.append((self.current_stream, fence))

    def synchronize(self) -> None:
        """Finish all fences, as the end of all work does."""
        self._enter()
        self.finish_fences()
