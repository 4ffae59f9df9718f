"""`Ledger`: what is reserved, created and mapped, so that a breach of the contract is refused before it reaches the OS.

Every driver keeps one, so all of them refuse the same things with the same words; a GPU driver alone would let some
pass, and on the host a stray `MAP_FIXED` would replace somebody else's memory. The cost is two dictionary entries a
mapping and one bisection a run. Knows neither torch, CUDA nor the OS.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import NamedTuple

from ..errors import DriverError
from .base import MappedRange, Run
from .intervals import Intervals

__all__ = ["Ledger", "Mappings", "Struck"]


class Mappings(NamedTuple):
    """Mappings as three columns of uint64, the form in which they go to native code."""

    addresses: array[int]
    handles: array[int]
    sizes: array[int]


class Struck(NamedTuple):
    """A range of whole mappings: the ranges mapped in its reservation, and its own handles by address."""

    mapped: Intervals
    address: int
    end: int
    handles: list[tuple[int, int]]


class _Reserved:
    """One reservation and the ranges mapped in it."""

    __slots__ = ("mapped", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.mapped = Intervals()


class Ledger:
    """The books of one driver.

    Hold `lock` around a change and the driver call it stands for. The exception is `drop_reservation`: call it without
    the lock, since finalizers run it at any moment of any thread, also of the one that holds the lock.

    Parameters
    ----------
    granularity : int
        Bytes that every address and size must be a multiple of.
    code, name
        The driver's own error for an invalid argument, used in the `DriverError` of a breach.

    Attributes
    ----------
    created_bytes : int
        Bytes behind all handles.
    """

    def __init__(self, granularity: int, code: int, name: str) -> None:
        self.lock = Lock()
        self.created_bytes = 0
        self._granularity = granularity
        self._code = code
        self._name = name
        self._reserved: dict[int, _Reserved] = {}
        self._starts: list[int] = []  # sorted; may list reservations that are gone, never misses one
        self._sizes: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._at: dict[int, int] = {}

    # --- what there is -----------------------------------------------------------------------------------------

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all reservations."""
        return sum(num_bytes for _, num_bytes in self.reservations())

    def reservations(self) -> list[tuple[int, int]]:
        """Address and bytes of each reservation."""
        return [(address, reserved.num_bytes) for address, reserved in list(self._reserved.items())]

    @property
    def mapped_count(self) -> int:
        """Mappings, aliases counted each."""
        return len(self._at)

    def idle_handles(self) -> list[int]:
        """Handles without a mapping."""
        return [handle for handle in self._sizes if handle not in self._uses]

    def breach(self, op: str, hint: str) -> DriverError:
        """The error for a call that breaks the contract."""
        return DriverError(op, self._code, self._name, hint)

    def check_size(self, op: str, num_bytes: int) -> None:
        """Refuse a size that is not a positive multiple of the granularity."""
        if num_bytes <= 0 or num_bytes % self._granularity:
            raise self.breach(op, f"{num_bytes} bytes is not a positive multiple of {self._granularity} bytes")

    # --- reservations and handles --------------------------------------------------------------------------------

    def add_reservation(self, address: int, num_bytes: int) -> None:
        """Note a new reservation."""
        self._reserved[address] = _Reserved(num_bytes)
        self._starts = sorted(self._reserved)

    def drop_reservation(self, address: int, num_bytes: int) -> None:
        """Forget a whole, empty reservation. Every step is atomic, as no lock is held; see the class."""
        reserved = self._reserved.get(address)
        if reserved is None or reserved.num_bytes != num_bytes:
            raise self.breach("free_reservation", f"{address:#x} with {num_bytes} bytes is not a reservation")
        if len(reserved.mapped):
            raise self.breach("free_reservation", f"the reservation at {address:#x} still has mappings")
        if self._reserved.pop(address, None) is None:
            raise self.breach("free_reservation", f"the reservation at {address:#x} was freed by another thread")

    def add_handles(self, handles: Iterable[int], num_bytes: int) -> None:
        """Note new handles of `num_bytes` each."""
        added = dict.fromkeys(handles, num_bytes)
        self._sizes.update(added)
        self.created_bytes += len(added) * num_bytes

    def drop_handles(self, handles: Sequence[int]) -> tuple[array[int], array[int], DriverError | None]:
        """Forget unmapped handles. Return them, their sizes, and the first error about one that must stay."""
        dropped, sizes = array("Q"), array("Q")
        failure: DriverError | None = None
        for handle in handles:
            if handle in self._uses:
                failure = failure or self.breach("release", f"handle {handle:#x} is still mapped")
            elif handle not in self._sizes:
                failure = failure or self.breach("release", f"handle {handle:#x} is unknown")
            else:
                dropped.append(handle)
                sizes.append(self._sizes.pop(handle))
                self.created_bytes -= sizes[-1]
        return dropped, sizes, failure

    # --- mappings --------------------------------------------------------------------------------------------------

    def claim(self, runs: Sequence[Run]) -> Mappings:
        """Note the mappings of all runs and return them as columns for the driver. On a breach, note none and raise."""
        columns = Mappings(array("Q"), array("Q"), array("Q"))
        for count, run in enumerate(runs):
            try:
                self._claim(run)
            except DriverError:
                self.unclaim(runs[:count])
                raise
            end = run.address + len(run.handles) * run.handle_bytes
            columns.addresses.extend(range(run.address, end, run.handle_bytes))
            columns.handles.extend(run.handles)
            columns.sizes.extend([run.handle_bytes] * len(run.handles))
        return columns

    def _claim(self, run: Run) -> None:
        address, handles, handle_bytes = run
        end = address + len(handles) * handle_bytes
        self.check_size("map", handle_bytes)
        mapped = self._mapped_in("map", address, end)
        if mapped.overlaps(address, end):
            raise self.breach("map", f"part of [{address:#x}, {end:#x}) is mapped already")
        for handle in handles:
            if self._sizes.get(handle) != handle_bytes:
                raise self.breach("map", f"handle {handle:#x} is not a handle of {handle_bytes} bytes")
        if not handles:
            return
        mapped.add(address, end)
        for handle in handles:
            self._at[address] = handle
            self._uses[handle] = self._uses.get(handle, 0) + 1
            address += handle_bytes

    def unclaim(self, runs: Sequence[Run]) -> None:
        """Forget what `claim` noted."""
        self.strike([MappedRange(run.address, len(run.handles) * run.handle_bytes) for run in runs if run.handles])

    def strike(self, ranges: Sequence[MappedRange]) -> list[Struck]:
        """Forget the mappings in all ranges. On a breach, forget none and raise."""
        struck: list[Struck] = []
        for mapped in ranges:
            try:
                struck.append(self._strike(mapped))
            except DriverError:
                self.restore(struck)
                raise
        return struck

    def _strike(self, range_: MappedRange) -> Struck:
        struck = self.check_mapped("unmap", *range_)
        struck.mapped.remove(struck.address, struck.end)
        for at, handle in struck.handles:
            del self._at[at]
            left = self._uses[handle] - 1
            if left:
                self._uses[handle] = left
            else:
                del self._uses[handle]
        return struck

    def check_mapped(self, op: str, address: int, num_bytes: int) -> Struck:
        """Refuse a range that is not made of whole mappings; return what is mapped there."""
        self.check_size(op, num_bytes)
        end = address + num_bytes
        mapped = self._mapped_in(op, address, end)
        handles: list[tuple[int, int]] = []
        at = address
        while at < end:
            handle = self._at.get(at)
            if handle is None:
                raise self.breach(op, f"no mapping starts at {at:#x} in [{address:#x}, {end:#x})")
            handles.append((at, handle))
            at += self._sizes[handle]
        if at != end:
            raise self.breach(op, f"[{address:#x}, {end:#x}) ends inside a mapping")
        return Struck(mapped, address, end, handles)

    def columns(self, struck: Iterable[Struck]) -> Mappings:
        """What `strike` forgot, as columns for the driver call."""
        pairs = [pair for _, _, _, handles in struck for pair in handles]
        sizes = array("Q", [self._sizes[handle] for _, handle in pairs])
        return Mappings(array("Q", [at for at, _ in pairs]), array("Q", [handle for _, handle in pairs]), sizes)

    def restore(self, struck: Iterable[Struck]) -> None:
        """Note again what `strike` forgot."""
        for mapped, address, end, handles in struck:
            mapped.add(address, end)
            for at, handle in handles:
                self._at[at] = handle
                self._uses[handle] = self._uses.get(handle, 0) + 1

    def _mapped_in(self, op: str, address: int, end: int) -> Intervals:
        """What is mapped in the reservation that holds ``[address, end)``."""
        if address % self._granularity:
            raise self.breach(op, f"address {address:#x} is not a multiple of {self._granularity} bytes")
        index = bisect_right(self._starts, address) - 1
        start = self._starts[index] if index >= 0 else 0
        reserved = self._reserved.get(start)
        if reserved is None or end > start + reserved.num_bytes:
            raise self.breach(op, f"[{address:#x}, {end:#x}) is not inside one reservation")
        return reserved.mapped
