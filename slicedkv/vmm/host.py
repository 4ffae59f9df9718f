"""`HostDriver`: virtual memory of this machine's CPU, so that everything above runs for real without a GPU.

A page or extent is a part of one memory file. Creating allocates that part, mapping maps it at a fixed address,
unmapping lays inaccessible addresses over it, and releasing punches a hole into the file. This is the only module that
touches libc. It must not know who maps what, or why.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
import weakref
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from ..errors import ConfigError, DriverError
from ..layout import align_up
from . import native, procfs
from .areas import AREA_HINT, AreaBudget, new_areas
from .base import Copy, Fence, MemoryInfo
from .intervals import Intervals
from .ledger import Mappings
from .strict import Outcome, StrictDriver

__all__ = ["HostDriver"]

# From the kernel's uapi headers mman-common.h and falloc.h; the mmap module lacks them in the versions supported.
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value

_FILE_END = 2**62
_MEMORY_STRIDE = 64 * 2**20  # bytes created between two looks at the free memory


class HostDriver(StrictDriver):
    """Virtual memory on the host.

    All verbs are thread-safe, and all are done when they return: fences are done at once. Memory belongs to the process
    that opened the driver. In a child of `os.fork` every verb but `close` raises `StateError`, and touching an address
    faults.

    Parameters
    ----------
    page_granularity : int, optional
        Smallest page in bytes, a multiple of the OS page. Default: one OS page. Reservations are aligned to it too.

    Raises
    ------
    ConfigError
        `page_granularity` is not a multiple of the OS page.
    """

    name = "host"
    torch_device = "cpu"
    can_protect = True

    def __init__(self, page_granularity: int | None = None) -> None:
        granularity = mmap.PAGESIZE if page_granularity is None else page_granularity
        if granularity <= 0 or granularity % mmap.PAGESIZE:
            raise ConfigError(
                f"page_granularity is {granularity}; it must be a multiple of {mmap.PAGESIZE}, the OS page"
            )
        super().__init__(granularity, (errno.EINVAL, "EINVAL"))
        self._native = native.load()
        self._file = os.memfd_create("slicedkv")
        self._close_file = weakref.finalize(self, os.close, self._file)
        self._free_offsets = Intervals([(granularity, _FILE_END)])  # a handle is its offset, and never 0
        self._areas = AreaBudget()
        self._unchecked_bytes = 0
        _opened.add(self)

    def used_bytes(self) -> int:
        """Bytes of physical memory behind all handles, as the OS counts them."""
        return os.fstat(self._file).st_blocks * 512  # st_blocks counts in 512 bytes, see stat(2)

    def memory_info(self) -> MemoryInfo:
        """Memory to be had without swapping, and all memory: the machine's or the cgroup's, whichever is less."""
        return procfs.memory_info()

    # --- primitives ------------------------------------------------------------------------------------------------

    def _reserve(self, num_bytes: int) -> int:
        slack = self._granularity - mmap.PAGESIZE
        at = _mmap(None, num_bytes + slack, _PROT_NONE, _NOTHING, -1, 0)
        if at is None:
            raise self._error("reserve", ctypes.get_errno())
        address = align_up(at, self._granularity)
        for start, end in ((at, address), (address + num_bytes, at + num_bytes + slack)):
            if start < end:
                _libc().munmap(start, end - start)
        return address

    def _free(self, address: int, num_bytes: int) -> None:
        if _libc().munmap(address, num_bytes):
            raise self._error("free_reservation", ctypes.get_errno())

    def _create(self, num_bytes: int, handles: array[int]) -> Outcome:
        self._check_memory(num_bytes * len(handles))
        for index in range(len(handles)):
            handles[index] = self._free_offsets.take_lowest(num_bytes)
        sizes = array("Q", [num_bytes]) * len(handles)
        done, code, op = self._allocate(handles, sizes)
        for offset in handles[done:]:
            self._free_offsets.add(offset, offset + num_bytes)
        return done, code, op

    def _allocate(self, offsets: array[int], sizes: array[int]) -> Outcome:
        if self._native is not None:
            return _outcome(self._native.host_create(self._file, offsets, sizes))
        for done, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            if code := _fallocate(self._file, 0, offset, size):
                return done, code, "create"
        return len(offsets), 0, ""

    def _release(self, handles: array[int], sizes: array[int]) -> Outcome:
        done, code, op = self._punch(handles, sizes)
        if not code:  # after a failure nobody knows which offsets still hold old bytes: leave them all out of use
            for offset, size in zip(handles, sizes, strict=True):
                if not self._free_offsets.overlaps(offset, offset + size):  # free already, if this is a second try
                    self._free_offsets.add(offset, offset + size)
        return done, code, op

    def _punch(self, offsets: array[int], sizes: array[int]) -> Outcome:
        if self._native is not None:
            return _outcome(self._native.host_release(self._file, offsets, sizes))
        codes = [_fallocate(self._file, _PUNCH_HOLE, *extent) for extent in zip(offsets, sizes, strict=True)]
        return codes.count(0), next(filter(None, codes), 0), "release"

    def _map(self, mappings: Mappings) -> Outcome:
        self._areas.spend(new_areas(mappings))
        if self._native is not None:
            return _outcome(self._native.host_map(self._file, *mappings))
        for done, (address, offset, size) in enumerate(zip(*mappings, strict=True)):
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            if _mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, self._file, offset) is None:
                code = ctypes.get_errno()
                while done and not _cover(mappings.addresses[done - 1], mappings.sizes[done - 1]):
                    done -= 1
                return done, code, "map"
        return len(mappings.addresses), 0, ""

    def _unmap(self, addresses: array[int], sizes: array[int]) -> Outcome:
        self._areas.note(2 * len(addresses))  # cutting one area in the middle leaves three
        if self._native is not None:
            return _outcome(self._native.host_unmap(addresses, sizes))
        for done, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
            if code := _cover(address, size):
                return done, code, "unmap"
        return len(addresses), 0, ""

    def _protect(self, address: int, num_bytes: int, *, writable: bool) -> int:
        if writable:
            self._areas.note(2)  # like unmapping, never refused
        elif not self._areas.has(2):
            return errno.ENOMEM
        return _mprotect(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ)

    def _error(self, op: str, code: int) -> DriverError:
        hint = AREA_HINT if code == errno.ENOMEM and op in {"map", "unmap", "protect"} else ""
        return DriverError(op, code, errno.errorcode.get(code, "unknown"), hint)

    def _close(self) -> None:
        self._close_file()

    def _disown(self) -> None:
        """In a forked child, cover the reservations with inaccessible addresses, so that nothing else comes there."""
        for reservation in self._ledger.reservations():
            if _cover(*reservation):
                _libc().munmap(*reservation)  # no area is left for that; unmapped addresses fault, too
        self._close_file()

    def _check_memory(self, num_bytes: int) -> None:
        """Refuse what the machine does not have: the kernel would promise it and then kill somebody for it."""
        if num_bytes > self._unchecked_bytes:
            free = self.memory_info().free_bytes
            if num_bytes > free:
                raise DriverError("create", errno.ENOMEM, "ENOMEM", f"{num_bytes} bytes asked for, {free} free")
            self._unchecked_bytes = num_bytes + min(_MEMORY_STRIDE, free - num_bytes)
        self._unchecked_bytes -= num_bytes

    # --- fences: the host has no work of its own -----------------------------------------------------------------

    def record_fence(self) -> Fence:
        self._enter()
        return _Done()

    def fence_done(self, fence: Fence) -> bool:
        self._enter()
        return True

    def wait_fence(self, fence: Fence, timeout_s: float) -> bool:
        self._enter()
        return True

    def order_after(self, fence: Fence) -> None:
        self._enter()

    def synchronize(self) -> None:
        self._enter()

    def copy_batch(self, copies: Sequence[Copy]) -> Fence:
        self._enter()
        begun = time.perf_counter()
        for target, source, num_bytes in copies:
            ctypes.memmove(target, source, num_bytes)  # without the GIL
        return _Done(time.perf_counter() - begun)

    def copy_seconds(self, fence: Any) -> float | None:
        return float(fence.seconds)


_opened: weakref.WeakSet[HostDriver] = weakref.WeakSet()


def _disown_all() -> None:
    for driver in list(_opened):
        driver._disown()


os.register_at_fork(after_in_child=_disown_all)  # madvise would have to be called for every page mapped


class _Done(NamedTuple):
    """A fence with nothing left to wait for."""

    seconds: float = 0.0


def _outcome(answer: Any) -> Outcome:
    """Give the native loop's answer its type."""
    outcome: Outcome = answer
    return outcome


@cache
def _libc() -> Any:
    """The C library with the signatures of what is used here."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, offset, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
    libc.mmap64.argtypes, libc.mmap64.restype = (address, size, number, number, number, offset), address
    libc.munmap.argtypes, libc.munmap.restype = (address, size), number
    libc.mprotect.argtypes, libc.mprotect.restype = (address, size, number), number
    libc.fallocate64.argtypes, libc.fallocate64.restype = (number, number, offset, offset), number
    return libc


def _mmap(at: int | None, size: int, protection: int, flags: int, file: int, offset: int) -> int | None:
    address: int | None = _libc().mmap64(at, size, protection, flags, file, offset)
    return None if address == _MAP_FAILED else address


def _cover(address: int, size: int) -> int:
    """Lay inaccessible addresses over a range and return the errno. munmap would leave a hole for others to map."""
    return ctypes.get_errno() if _mmap(address, size, _PROT_NONE, _NOTHING | _MAP_FIXED, -1, 0) is None else 0


def _mprotect(address: int, size: int, protection: int) -> int:
    """Change the access rights of a mapped range and return the errno."""
    return ctypes.get_errno() if _libc().mprotect(address, size, protection) else 0


def _fallocate(file: int, mode: int, offset: int, size: int) -> int:
    """Allocate or punch a part of a file and return the errno."""
    while _libc().fallocate64(file, mode, offset, size):
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0
