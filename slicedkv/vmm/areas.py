"""`AreaBudget`: keeps the process's mapped areas below the kernel's limit. Counts; maps nothing."""

from __future__ import annotations

import errno

from ..errors import DriverError
from . import procfs
from .ledger import Mappings

__all__ = ["AREA_HINT", "AreaBudget", "new_areas"]

AREA_HINT = "the process has too many mapped areas: use larger page_bytes, or raise the sysctl vm.max_map_count"


class AreaBudget:
    """Keeps the process below `vm.max_map_count`: at that limit not even unmapping works.

    It is costly to predict how areas merge. So each call is charged for the most areas it could add, and the areas are
    counted anew only when the budget is used up. Unmapping is never refused: the headroom is for it, and for everybody
    else in the process.
    """

    HEADROOM_SHARE = 16  # one area in 16 stays unused, 4,095 at the kernel's default

    def __init__(self) -> None:
        self._left = 0

    def spend(self, areas: int) -> None:
        """Charge for mapping; raise `DriverError` when there is no room."""
        if not self.has(areas):
            raise DriverError("map", errno.ENOMEM, "ENOMEM", AREA_HINT)

    def has(self, areas: int) -> bool:
        """Charge for some areas and return True where there is room for them; return False where there is none."""
        if areas > self._left:
            limit = procfs.area_limit()
            self._left = limit - limit // self.HEADROOM_SHARE - procfs.count_areas()
        if areas > self._left:
            return False
        self._left -= areas
        return True

    def note(self, areas: int) -> None:
        """Charge for unmapping."""
        self._left -= areas


def new_areas(mappings: Mappings) -> int:
    """The most areas that mapping these can add.

    A mapping that continues the one before in address and file adds none, one that continues it in address alone adds
    1, any other 2.
    """
    areas, next_address, next_offset = 0, -1, -1
    for address, offset, size in zip(*mappings, strict=True):
        if address != next_address:
            areas += 2
        elif offset != next_offset:
            areas += 1
        next_address, next_offset = address + size, offset + size
    return areas
