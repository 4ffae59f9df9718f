"""`Reservation`: one plane's address range, and the arithmetic from (slot, page) to addresses in it.

The cache holds it, and so does every tensor over it. The addresses stay reserved until the last of them lets go, so a
view that outlives the cache never sees somebody else's memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

from ..errors import DriverError, OutOfPagesError
from ..vmm.base import Driver, MappedRange, Run
from .patience import again_under_pressure

__all__ = ["Reservation", "map_runs"]


class Reservation:
    """A range of virtual addresses divided into equal slots.

    The range is given back to the driver when the object is collected, never earlier.

    Parameters
    ----------
    driver : Driver
    num_slots, slot_bytes, page_bytes : int
        Slots of `slot_bytes` each, a multiple of `page_bytes`.
    """

    def __init__(self, driver: Driver, *, num_slots: int, slot_bytes: int, page_bytes: int) -> None:
        self.num_bytes = num_slots * slot_bytes
        self.slot_bytes = slot_bytes
        self.page_bytes = page_bytes
        self.address = driver.reserve(self.num_bytes)
        finalizer = weakref.finalize(self, _free, driver, self.address, self.num_bytes, os.getpid())
        finalizer.atexit = False  # the process's end gives all addresses back anyway

    def __repr__(self) -> str:
        return f"Reservation({self.address:#x}, {self.num_bytes} bytes, slots of {self.slot_bytes} bytes)"

    def page_address(self, slot: int, page: int) -> int:
        """Address of page `page` of slot `slot`."""
        return self.address + slot * self.slot_bytes + page * self.page_bytes

    def run(self, slot: int, page: int, handles: Sequence[int], handle_pages: int) -> Run:
        """The run that maps `handles` side by side from page `page` of a slot."""
        return Run(self.page_address(slot, page), handles, handle_pages * self.page_bytes)

    def mapped_range(self, slot: int, first_page: int, end_page: int) -> MappedRange:
        """The range of pages ``[first_page, end_page)`` of a slot."""
        return MappedRange(self.page_address(slot, first_page), (end_page - first_page) * self.page_bytes)


def map_runs(driver: Driver, runs: Sequence[Run], page_bytes: int) -> None:
    """Map runs of any planes. If the driver is short of memory for it, ask its other users once to make room.

    Raises
    ------
    OutOfPagesError, DriverError
        Nothing was mapped, unless the latter says `left_behind`.
    """
    try:
        again_under_pressure(driver, lambda: driver.map_batch(runs))
    except DriverError as error:
        if error.left_behind or not error.out_of_memory:
            raise
        pages = sum(len(run.handles) * run.handle_bytes for run in runs) // page_bytes
        raise OutOfPagesError(f"mapping {pages} pages: {error}", requested=pages, available=0) from error


def _free(driver: Driver, address: int, num_bytes: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        driver.free_reservation(address, num_bytes)
