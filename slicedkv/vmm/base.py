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
- Where a driver `can_protect`, mappings can be made read-only and writable again, each on its own: a write to one that
  is read-only faults. What is mapped anew is writable.
- Every verb that takes several things either does all of them or undoes what it did and raises.
- Every verb may be called from any thread. No verb except `wait_fence` and `synchronize` waits for the GPU.
- Bytes are moved between mapped addresses and host memory by `copy_batch` alone, beside the caller's stream; a fence
  says when that is done. Host memory that is pinned moves faster and leaves the calling thread free.
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
"""A point in the work submitted to the device; opaque to callers, meaningful only to the driver that recorded it."""


class MemoryInfo(NamedTuple):
    """Physical memory of the device in bytes."""

    free_bytes: int
    total_bytes: int


class Run(NamedTuple):
    """Handles to be mapped side by side: the i-th at `address + i * handle_bytes`."""

    address: int
    handles: Sequence[int]
    handle_bytes: int


class MappedRange(NamedTuple):
    """A mapped address range made of whole mappings."""

    address: int
    num_bytes: int


class Copy(NamedTuple):
    """Bytes to be copied from `source` to `target`: one is mapped for all of them, the other is host memory."""

    target: int
    source: int
    num_bytes: int


class Driver(Unique, ABC):
    """Virtual memory of one device.

    The single verbs are abstract; the `*_batch` verbs have a default that loops over them and undoes itself on
    failure, which a driver overrides where it can do a whole batch in one native call.

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
        """Smallest size a handle, an address and a mapping must be a multiple of, in bytes."""

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
        """Whether `protect` works. Finding out may make driver calls, the first time.

        Raises
        ------
        DriverError
            It could not be found out now.
        """
        return False

    def protect(self, address: int, num_bytes: int, *, writable: bool) -> None:
        """Make whole neighbouring mappings read-only, or writable again; what they are already they may stay.

        After a failure each of them is as it was or as it was asked to be. Waits for no work: nothing that is under way
        on the device may write what becomes read-only.
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
        """Release every handle; an error is raised only after all were tried."""
        failure: DriverError | None = None
        for handle in handles:
            try:
                self.release(handle)
            except DriverError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def map_batch(self, runs: Sequence[Run]) -> None:
        """Map several runs. All or nothing, but where an error says `left_behind`."""
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
        """Unmap several ranges in order; the first failure stops and raises, with `error.completed` ranges unmapped."""
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
        """Copy ranges after all work submitted so far on the caller's stream, beside what is submitted there later.

        Batches are copied in the order of the calls. On failure nothing is being copied any more.

        Returns
        -------
        Fence
            Done when everything is copied.
        """

    @abstractmethod
    def copy_seconds(self, fence: Fence) -> float | None:
        """Seconds that the copies behind a fence of `copy_batch` took, once it is done; None before. Never waits."""

    def pin(self, address: int, num_bytes: int) -> None:  # host memory is as good as pinned for a host
        """Pin host memory, so that it can be copied from and to without the calling thread. May be slow."""

    def unpin(self, address: int, num_bytes: int) -> None:
        """Undo `pin` of the same range; nothing may be copied there any more."""

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
