"""`HostPool`: bounded host memory for the rows of requests that left the device.

Memory comes in chunks. Pinning is slow, so each chunk is pinned once and kept. A request's rows are one span in one. A
span that is given back is used again when the copy that reads or writes it is done. The gate's lock guards the books;
methods marked *token*, which make chunks and give them up, need its work token.
"""

from __future__ import annotations

import ctypes
import mmap
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from ..errors import CapacityError, DriverError, StateError
from ..layout import align_up
from ..vmm.base import Driver, Fence
from ..vmm.intervals import Intervals
from .gate import Gate
from .patience import TIMEOUT_S

__all__ = ["HostPool", "HostSpan"]

_CHUNK_BYTES = 256 << 20
_SLOWEST_BYTES_PER_S = 1e8
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, which the mmap module lacks; see madvise(2), Linux 4.14


class HostSpan:
    """A stretch of host memory that one request's rows lie in.

    Attributes
    ----------
    address, num_bytes : int
        Whole pages of the OS.
    fence : Fence or None
        Of the last copy that reads or writes it.
    """

    __slots__ = ("address", "chunk", "fence", "num_bytes")

    def __init__(self, chunk: _Chunk | None, address: int, num_bytes: int) -> None:
        self.chunk = chunk
        self.address = address
        self.num_bytes = num_bytes
        self.fence: Fence | None = None


class HostPool:
    """Take and give back spans of host memory under a limit.

    Parameters
    ----------
    driver : Driver
        Pins the memory. If it cannot, the pool uses ordinary memory and a `RuntimeWarning` says so.
    gate : Gate
        Guards the books.
    limit_bytes : int
        Bytes that all chunks together may have.
    chunk_bytes : int
        Bytes of a chunk; a longer span gets a chunk of its own.
    """

    def __init__(self, driver: Driver, gate: Gate, limit_bytes: int, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._driver = driver
        self._gate = gate
        self._chunk_bytes = chunk_bytes
        self._chunks: list[_Chunk] = []
        self._used_bytes = 0
        # Whoever drops a handle may hold any lock, the collector included: appending needs none.
        self._returned: deque[HostSpan] = deque()
        self._waiting: list[HostSpan] = []
        self._closed = False

    @property
    def created_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.num_bytes for chunk in self._chunks)

    @property
    def used_bytes(self) -> int:
        """Bytes of all spans that were taken and not given back."""
        return self._used_bytes - sum(span.num_bytes for span in list(self._returned))

    def take(self, sizes: Sequence[int]) -> list[HostSpan]:
        """*token* Return one span for each size in bytes, all or nothing.

        When memory is short, it waits, for a bounded time, for copies of spans that were given back.

        Raises
        ------
        CapacityError
            The limit does not hold them, or the host has no memory; nothing was changed.
        """
        self._collect(wait=False)
        taken: list[HostSpan] = []
        with ExitStack() as undo:
            for num_bytes in sizes:
                taken.append(self._take(num_bytes))
                undo.callback(self.give_back, taken[-1])
            undo.pop_all()
        return taken

    def _take(self, num_bytes: int) -> HostSpan:
        if not num_bytes:
            return HostSpan(None, 0, 0)
        least = align_up(num_bytes, mmap.PAGESIZE)
        span = self._place(least) or self._place_in_new(least)
        if span is None and self._waiting:
            self._collect(wait=True)
            span = self._place(least) or self._place_in_new(least)
        if span is None:
            available = self.limit_bytes - self.used_bytes
            raise CapacityError(
                f"{num_bytes} bytes of host memory needed in one piece; {available} of swap_limit, {self.limit_bytes}, "
                "are not in use; release handles or raise swap_limit",
                requested=num_bytes,
                available=available,
            )
        return span

    def _place(self, num_bytes: int) -> HostSpan | None:
        """Take the first place in a chunk that is large enough."""
        with self._gate.lock:
            for chunk in self._chunks:
                with suppress(ValueError):
                    offset = chunk.free.take_lowest(num_bytes)
                    self._used_bytes += num_bytes
                    return HostSpan(chunk, chunk.address + offset, num_bytes)
        return None

    def _place_in_new(self, num_bytes: int) -> HostSpan | None:
        """Take a place in a new chunk, giving up empty ones where the limit asks for it."""
        if self.limit_bytes - self.created_bytes < num_bytes:
            self._give_up([chunk for chunk in self._chunks if chunk.empty])
        room = self.limit_bytes - self.created_bytes
        if room < num_bytes:
            return None
        try:
            chunk = _Chunk(max(num_bytes, min(self._chunk_bytes, room // mmap.PAGESIZE * mmap.PAGESIZE)))
        except (OSError, MemoryError) as error:
            raise CapacityError(
                f"the host has no {num_bytes} bytes for rows that are swapped out: {error}; lower swap_limit",
                requested=num_bytes,
                available=0,
            ) from error
        self._pin(chunk)
        with self._gate.lock:
            self._chunks.append(chunk)
        return self._place(num_bytes)

    def _pin(self, chunk: _Chunk) -> None:
        try:
            self._driver.pin(chunk.address, chunk.num_bytes)
        except DriverError as error:
            warnings.warn(
                f"{chunk.num_bytes} bytes of host memory could not be pinned ({error}); swapping will be slower. Lower "
                "swap_limit or raise the limit on locked memory (ulimit -l)",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            chunk.pinned = True

    def give_back(self, span: HostSpan) -> None:
        """Take a span back. Its bytes are used again once its fence is done. It never waits and takes no lock."""
        if not self._closed:
            self._returned.append(span)

    def _collect(self, *, wait: bool) -> None:
        """*token* Make room of returned spans whose copies are done; with `wait`, wait for the others."""
        with self._gate.lock:
            while self._returned:
                span = self._returned.popleft()
                self._used_bytes -= span.num_bytes
                self._waiting.append(span)
        for span in list(self._waiting):
            if self._is_done(span, wait=wait):
                with self._gate.lock:
                    self._waiting.remove(span)
                    if span.chunk is not None:
                        span.chunk.put_back(span)

    def _is_done(self, span: HostSpan, *, wait: bool) -> bool:
        if span.fence is None:
            return True
        return self.wait(span) if wait else self._driver.fence_done(span.fence)

    def wait(self, *spans: HostSpan) -> bool:
        """Wait for the copies of spans, for a time that grows with their bytes; False when that ran out."""
        timeout_s = TIMEOUT_S + sum(span.num_bytes for span in spans) / _SLOWEST_BYTES_PER_S
        return all(span.fence is None or self._driver.wait_fence(span.fence, timeout_s) for span in spans)

    def trim(self) -> None:
        """*token* Give chunks without spans back to the system."""
        self._collect(wait=False)
        self._give_up([chunk for chunk in self._chunks if chunk.empty])

    def close(self) -> None:
        """*token* Give all memory back, also of spans that are held. The device must be idle. May be called again."""
        self._closed = True
        self._give_up(self._chunks)
        with self._gate.lock:
            self._returned.clear()
            self._waiting.clear()
            self._used_bytes = 0

    def _give_up(self, chunks: Sequence[_Chunk]) -> None:
        for chunk in list(chunks):
            if chunk.pinned:
                self._driver.unpin(chunk.address, chunk.num_bytes)
            with self._gate.lock:
                self._chunks.remove(chunk)
            chunk.close()

    def check_integrity(self) -> None:
        """Raise `StateError` if bytes in use and free do not add up. Call with the lock held, and the token."""
        held = self._used_bytes + sum(span.num_bytes for span in self._waiting)
        taken = sum(chunk.num_bytes - chunk.free.total() for chunk in self._chunks)
        if held != taken or self.created_bytes > self.limit_bytes:
            raise StateError(
                f"host memory: {held} bytes held and {taken} taken of {self.created_bytes}; swap_limit is "
                f"{self.limit_bytes}"
            )


class _Chunk:
    """Host memory of this process alone. A forked child does not get it, so the device finds it where it was."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.free = Intervals([(0, num_bytes)])
        self.pinned = False
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:  # a forked child keeps the addresses, which it unmaps when it drops the chunk
            self._memory.madvise(_WIPE_ON_FORK)
        except OSError:  # a kernel that does not know it: there they may be somebody else's in the child
            self._memory.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel without huge pages; pinning only takes longer
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def empty(self) -> bool:
        return self.free.total() == self.num_bytes

    def put_back(self, span: HostSpan) -> None:
        offset = span.address - self.address
        self.free.add(offset, offset + span.num_bytes)

    def close(self) -> None:
        self._memory.close()
