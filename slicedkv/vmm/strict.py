"""`StrictDriver`: the contract of `base` enforced once, over a handful of unchecked primitives.

A driver for real memory says how to reserve, create, release, map and unmap columns of numbers. This class checks
every call against its ledger first, keeps the ledger true when a primitive fails, and turns codes into `DriverError`.
Primitives run with the ledger's lock held: the OS and the GPU driver serialise such calls anyway. Knows neither torch
nor CUDA nor the OS.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from array import array
from collections.abc import Sequence

from ..errors import DriverError, StateError
from .base import Driver, MappedRange, Run
from .ledger import Ledger, Mappings

__all__ = ["Outcome", "StrictDriver"]

Outcome = tuple[int, int, str]
"""How far a primitive came: items done, the code of the failure that stopped it (0: none), and the verb that failed."""


class StrictDriver(Driver):
    """A driver whose breaches of contract are refused before any primitive runs.

    Parameters
    ----------
    granularity : int
        In bytes.
    invalid : tuple of int and str
        Code and name of the driver's own error for an invalid argument.
    """

    def __init__(self, granularity: int, invalid: tuple[int, str]) -> None:
        self._granularity = granularity
        self._ledger = Ledger(granularity, *invalid)
        self._pid = os.getpid()
        self._closed = False

    # --- primitives ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _reserve(self, num_bytes: int) -> int:
        """Reserve addresses, or raise `DriverError`."""

    @abstractmethod
    def _free(self, address: int, num_bytes: int) -> None:
        """Free a whole reservation, or raise `DriverError`."""

    @abstractmethod
    def _create(self, num_bytes: int, handles: array[int]) -> Outcome:
        """Fill `handles` from the front until done or failed. What is filled at a failure is kept."""

    @abstractmethod
    def _release(self, handles: array[int], sizes: array[int]) -> Outcome:
        """Release every handle even when one fails. The code is that of the first failure."""

    @abstractmethod
    def _map(self, mappings: Mappings) -> Outcome:
        """Map everything, or nothing. Where undoing a failure fails too, the first `done` are still mapped.

        An interrupt may leave a part mapped; `map_batch` undoes that.
        """

    @abstractmethod
    def _unmap(self, addresses: array[int], sizes: array[int]) -> Outcome:
        """Unmap range after range until done or failed."""

    def _protect(self, address: int, num_bytes: int, *, writable: bool) -> int:
        """Make whole mappings read-only or writable and return the code. Called only if the driver `can_protect`."""
        raise NotImplementedError

    @abstractmethod
    def _error(self, op: str, code: int) -> DriverError:
        """The error for a code of this driver."""

    def _close(self) -> None:
        """Drop the driver's own resources, if it has some."""

    def _enter(self) -> None:
        """Make sure the calling thread may use the driver. Cheap: runs on every call."""
        self._check_process()
        if self._closed:
            raise StateError(f"the {self.name} driver is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"the {self.name} driver belongs to process {self._pid} and cannot be used in its forked child "
                f"{os.getpid()}; open a new one there"
            )

    # --- the contract ----------------------------------------------------------------------------------------------

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, num_bytes: int) -> int:
        self._enter()
        self._ledger.check_size("reserve", num_bytes)
        with self._ledger.lock:
            try:
                address = self._reserve(num_bytes)
            except DriverError as error:
                hint = f"{num_bytes} bytes of addresses were asked for; lower max_batch_size or max_seq_len"
                raise DriverError(error.op, error.code, error.name, hint) from error
            self._ledger.add_reservation(address, num_bytes)
        return address

    def free_reservation(self, address: int, num_bytes: int) -> None:
        self._check_process()
        self._ledger.drop_reservation(address, num_bytes)
        self._free(address, num_bytes)

    def create(self, num_bytes: int) -> int:
        return self.create_batch(num_bytes, 1)[0]

    def release(self, handle: int) -> None:
        self.release_batch((handle,))

    def map_run(self, address: int, handles: Sequence[int], handle_bytes: int) -> None:
        self.map_batch((Run(address, handles, handle_bytes),))

    def unmap_run(self, address: int, num_bytes: int) -> None:
        self.unmap_batch((MappedRange(address, num_bytes),))

    def create_batch(self, num_bytes: int, count: int) -> list[int]:
        self._enter()
        self._ledger.check_size("create", num_bytes)
        if count < 0:
            raise self._ledger.breach("create", f"count is {count}")
        handles = array("Q", bytes(8 * count))
        with self._ledger.lock:
            try:
                done, code, op = self._create(num_bytes, handles)
            except BaseException:  # an interrupt, perhaps after the batch was done: what is there must go
                made = array("Q", filter(None, handles))
                self._release(made, array("Q", [num_bytes]) * len(made))
                raise
            if code:
                self._release(handles[:done], array("Q", [num_bytes]) * done)
                raise self._error(op, code)
            self._ledger.add_handles(handles, num_bytes)
        return handles.tolist()

    def release_batch(self, handles: Sequence[int]) -> None:
        self._enter()
        with self._ledger.lock:
            dropped, sizes, failure = self._ledger.drop_handles(handles)
            try:
                _, code, op = self._release(dropped, sizes)
            except BaseException:  # as above; a handle that is released already only fails again
                self._release(dropped, sizes)
                raise
        if failure is not None:
            raise failure
        if code:
            raise self._error(op, code)

    def map_batch(self, runs: Sequence[Run]) -> None:
        self._enter()
        with self._ledger.lock:
            mappings = self._ledger.claim(runs)
            try:
                left, code, op = self._map(mappings)
            except BaseException:  # as above: nobody knows what is mapped
                self._unmap_each(mappings)
                self._ledger.unclaim(runs)
                raise
            if code:
                # What is left is still mapped: nobody may map there, or release these handles.
                ends = zip(mappings.addresses[left:], mappings.sizes[left:], strict=True)
                self._ledger.strike([MappedRange(*end) for end in ends])
                error = self._error(op, code)
                error.left_behind = left > 0
                raise error

    def _unmap_each(self, mappings: Mappings) -> None:
        """Unmap each of these that is mapped; the others only fail."""
        for nth in reversed(range(len(mappings.addresses))):
            self._unmap(mappings.addresses[nth : nth + 1], mappings.sizes[nth : nth + 1])

    def unmap_batch(self, ranges: Sequence[MappedRange]) -> None:
        self._enter()
        with self._ledger.lock:
            struck = self._ledger.strike(ranges)
            addresses = array("Q", [mapped.address for mapped in ranges])
            sizes = array("Q", [mapped.num_bytes for mapped in ranges])
            try:
                done, code, op = self._unmap(addresses, sizes)
            except BaseException:  # as above
                mappings = self._ledger.columns(struck)
                self._unmap_each(mappings)
                _, code, op = self._map(mappings)
                if code:
                    raise self._error(op, code) from None
                self._ledger.restore(struck)
                raise
            if code:
                self._ledger.restore(struck[done:])
                error = self._error(op, code)
                error.completed = done
                raise error

    def protect(self, address: int, num_bytes: int, *, writable: bool) -> None:
        self._enter()
        if not self.can_protect:
            super().protect(address, num_bytes, writable=writable)
        with self._ledger.lock:
            self._ledger.check_mapped("protect", address, num_bytes)
            code = self._protect(address, num_bytes, writable=writable)
        if code:
            raise self._error("protect", code)

    def close(self) -> None:
        """Close the driver and release the handles that no mapping uses. Calling it twice, or in a fork, is fine."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._ledger.lock:
            left, sizes, _ = self._ledger.drop_handles(self._ledger.idle_handles())
            self._release(left, sizes)
        self._closed = True
        self._close()
