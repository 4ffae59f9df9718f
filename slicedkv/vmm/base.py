"""The contract between slicedkv and a virtual-memory driver: verbs, preconditions, what failure leaves behind.

One implementation per file beside this one. Nothing above this package knows which driver it talks to, and this
module knows neither torch nor CUDA. Addresses, handles and sizes are plain ints; sizes are in bytes.

The contract, for every driver:

- Reservations, handles and mappings are three things; each is undone by its own verb, in reverse order.
- A handle is created for a size and is mapped whole. It may be mapped at several addresses at once (aliases see
  each other's writes). It is released only when no mapping of it is left.
- A range is mapped once: mapping over a mapping is an error, and so is unmapping what is not mapped, or part of a
  handle. One `unmap_run` may span several whole neighbouring mappings.
- Mapped memory is readable and writable at once. Memory of a new handle holds zeros on the host and anything on a GPU.
- A driver that `can_protect` can make each mapping read-only, and writable again. A write to a read-only mapping
  faults. A new mapping is writable.
- A verb that takes several things does all of them, or undoes what it did and raises. There are two exceptions:
  `release_batch` goes on to the end, and `unmap_batch` stops and says how far it came.
- Every verb may be called from any thread. No verb except `wait_fence` and `synchronize` waits for the GPU.
- `copy_batch` alone moves bytes between mapped addresses and host memory. It works beside the caller's stream, and its
  fence says when it is done. Pinned host memory moves faster and leaves the calling thread free.
- Failures raise `DriverError`; the driver stays usable.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import DriverError
from ..unique import Unique

__all__ = ["Copy", "Driver", "Fence", "MappedRange", "MemoryInfo", "Run"]

Fence = object
"""A point in the work submitted to the device. Only the driver that recorded it knows what is inside."""


class MemoryInfo(NamedTuple):
    """Physical memory of the device in bytes."""

    free_bytes: int
    total_bytes: int


class Run(NamedTuple):
    """Handles to map side by side: the i-th at `address + i * handle_bytes`."""

    address: int
    handles: Sequence[int]
    handle_bytes: int


class MappedRange(NamedTuple):
    """A mapped address range made of whole mappings."""

    address: int
    num_bytes: int


class Copy(NamedTuple):
    """Bytes to copy from `source` to `target`. One of the two is mapped for all of them, the other is host memory."""

    target: int
    source: int
    num_bytes: int


class Driver(Unique, ABC):
    """Virtual memory of one device.

    The single verbs are abstract. The `*_batch` verbs by default loop over them, and undo on failure what they did. A
    driver overrides a batch verb where it can do the whole batch in one native call.

    Attributes
    ----------
    name : str
        "cuda", "host" or "fake".
    torch_device : str
        The torch device string of tensors that lie at this driver's addresses.
    """

    name: str
    torch_device: str

    @property
    @abstractmethod
    def granularity(self) -> int:
        """Bytes that every address and every size, of a handle or a mapping, must be a multiple of."""

    @abstractmethod
    def reserve(self, num_bytes: int) -> int:
        """Reserve an address range with nothing behind it and return its first address."""

    @abstractmethod
    def free_reservation(self, address: int, num_bytes: int) -> None:
        """Give back a whole reservation that has no mapping left. Legal after `close`."""

    @abstractmethod
    def create(self, num_bytes: int) -> int:
        """Commit physical memory and return its handle."""

    @abstractmethod
    def release(self, handle: int) -> None:
        """Return an unmapped handle's memory to the device."""

    @abstractmethod
    def map_run(self, address: int, handles: Sequence[int], handle_bytes: int) -> None:
        """Map `handles` side by side from `address` and make them accessible. All or nothing."""

    @abstractmethod
    def unmap_run(self, address: int, num_bytes: int) -> None:
        """Unmap a range of whole mappings."""

    @property
    def can_protect(self) -> bool:
        """Whether `protect` works. The driver may make calls to find out, the first time.

        Raises
        ------
        DriverError
            One of these calls failed, so the answer is not known now.
        """
        return False

    def protect(self, address: int, num_bytes: int, *, writable: bool) -> None:
        """Make whole neighbouring mappings read-only, or writable again. Those that are so already stay so.

        After a failure, each of them is as it was or as the caller wanted it. The call waits for no work: the caller
        sees to it that no work under way on the device writes what becomes read-only.
        """
        raise DriverError("protect", errno.ENOTSUP, "ENOTSUP", f"the {self.name} driver cannot make mappings read-only")

    def create_batch(self, num_bytes: int, count: int) -> list[int]:
        """Create `count` handles of `num_bytes` each. All or nothing."""
        handles: list[int] = []
        try:
            for _ in range(count):
                handles.append(self.create(num_bytes))
        except BaseException:
            self.release_batch(handles)
            raise
        return handles

    def release_batch(self, handles: Sequence[int]) -> None:
        """Release every handle. Tries all of them, then raises the first error, if any."""
        failure: DriverError | None = None
        for handle in handles:
            try:
                self.release(handle)
            except DriverError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def map_batch(self, runs: Sequence[Run]) -> None:
        """Map several runs. All or nothing; if undoing fails too, the error says `left_behind`."""
        done: list[Run] = []
        try:
            for run in runs:
                self.map_run(run.address, run.handles, run.handle_bytes)
                done.append(run)
        except BaseException as error:
            for run in reversed(done):
                try:
                    self.unmap_run(run.address, len(run.handles) * run.handle_bytes)
                except DriverError:
                    if isinstance(error, DriverError):
                        error.left_behind = True
            raise

    def unmap_batch(self, ranges: Sequence[MappedRange]) -> None:
        """Unmap several ranges in order. Stops and raises at the first failure, after `error.completed` ranges."""
        for completed, mapped in enumerate(ranges):
            try:
                self.unmap_run(mapped.address, mapped.num_bytes)
            except DriverError as error:
                error.completed = completed
                raise

    @abstractmethod
    def record_fence(self) -> Fence:
        """Mark all work submitted so far on the caller's stream of this device."""

    @abstractmethod
    def fence_done(self, fence: Fence) -> bool:
        """True when the work before the fence is finished. Never waits."""

    @abstractmethod
    def wait_fence(self, fence: Fence, timeout_s: float) -> bool:
        """Wait until the fence is done; False when `timeout_s` seconds ran out first."""

    @abstractmethod
    def order_after(self, fence: Fence) -> None:
        """Make work submitted later on the caller's stream start after the fence, without waiting here."""

    @abstractmethod
    def copy_batch(self, copies: Sequence[Copy]) -> Fence:
        """Copy after all work submitted so far on the caller's stream, and beside what is submitted there later.

        The device copies batches in the order of the calls. After a failure, no copy of this batch is under way.

        Returns
        -------
        Fence
            Done when everything is copied.
        """

    @abstractmethod
    def copy_seconds(self, fence: Fence) -> float | None:
        """Seconds that a `copy_batch` took, by its fence; None until the fence is done. Never waits."""

    def pin(self, address: int, num_bytes: int) -> None:  # host memory is as good as pinned for a host
        """Pin host memory, so that copies from and to it need no thread of the host. May be slow."""

    def unpin(self, address: int, num_bytes: int) -> None:
        """Undo `pin` of the same range. No copy from or to it may be under way."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work of the device."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Free and total physical memory now."""

    def relieve_pressure(self) -> bool:
        """Ask other users in this process to give cached memory back; True when it is worth trying again."""
        return False

    def bind_thread(self) -> None:  # most drivers need nothing
        """Prepare the calling thread for long use (device context, capture mode). Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Drop the driver's own resources. Mappings and handles must be gone; reservations may outlive it."""
