"""`References`: how often each handle of a pool is mapped. Numbers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..errors import StateError

__all__ = ["Handles", "References"]


class Handles(NamedTuple):
    """Handles by size."""

    pages: list[int]
    extents: list[int]


class References:
    """Mappings of each handle that has some. Not thread-safe: the pool calls it with its gate's lock held.

    Parameters
    ----------
    extent_pages : int
        Pages of an extent.

    Attributes
    ----------
    mapped_pages : int
        Pages mapped at least once, each counted once.
    shared_pages : int
        Pages mapped more than once, each counted once.
    """

    def __init__(self, extent_pages: int) -> None:
        self._counts: dict[int, int] = {}
        self._sizes = (1, extent_pages)
        self.mapped_pages = 0
        self.shared_pages = 0

    def of(self, handle: int) -> int:
        """Mappings of a handle."""
        return self._counts.get(handle, 0)

    def add(self, handles: Handles) -> None:
        """Count one mapping more of each handle."""
        for group, size in zip(handles, self._sizes, strict=True):
            for handle in group:
                count = self._counts.get(handle, 0) + 1
                self._counts[handle] = count
                self.mapped_pages += size * (count == 1)
                self.shared_pages += size * (count == 2)

    def drop(self, handles: Handles) -> Handles:
        """Count one mapping less of each handle and return those that have none left."""
        unmapped = Handles([], [])
        for group, gone, size in zip(handles, unmapped, self._sizes, strict=True):
            for handle in group:
                left = self._counts[handle] - 1
                if left:
                    self._counts[handle] = left
                    self.shared_pages -= size * (left == 1)
                else:
                    del self._counts[handle]
                    gone.append(handle)
            self.mapped_pages -= size * len(gone)
        return unmapped

    def check(self, mapped: Mapping[int, int], free: Handles) -> None:
        """Raise `StateError` unless these are all the mappings, and no handle is free twice or free and mapped."""
        if mapped != self._counts:
            wrong = {h for h in mapped.keys() | self._counts.keys() if mapped.get(h) != self._counts.get(h)}
            raise StateError(f"handles {sorted(wrong)[:8]} are counted wrongly: mappings and references differ")
        handles = free.pages + free.extents
        if len(set(handles)) != len(handles) or not self._counts.keys().isdisjoint(handles):
            raise StateError("a handle is free twice, or free and mapped")
