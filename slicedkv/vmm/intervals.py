"""`Intervals`: a set of integers kept as sorted half-open ranges, neighbours merged.

Serves as the list of what is mapped in a reservation and as the list of what is free in a file. Knows nothing of
memory; not thread-safe, its owner locks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["Intervals"]


class Intervals:
    """Disjoint ranges ``[start, end)``; every operation but `take_lowest` is one bisection."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def total(self) -> int:
        """Integers in all ranges together."""
        return sum(self._ends) - sum(self._starts)

    def overlaps(self, start: int, end: int) -> bool:
        """True when any part of ``[start, end)`` is in the set."""
        before_end = bisect_left(self._starts, end)
        return before_end > 0 and self._ends[before_end - 1] > start

    def covers(self, start: int, end: int) -> bool:
        """True when all of ``[start, end)`` is in the set."""
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and self._ends[at] >= end

    def add(self, start: int, end: int) -> None:
        """Add ``[start, end)``, of which nothing may be in the set yet.

        Raises
        ------
        ValueError
            The range is empty or overlaps the set.
        """
        if start >= end or self.overlaps(start, end):
            raise ValueError(f"cannot add [{start}, {end})")
        at = bisect_left(self._starts, start)
        joins_left = at > 0 and self._ends[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == end
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            del self._starts[at]
        elif joins_left:
            self._ends[at - 1] = end
        elif joins_right:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)

    def remove(self, start: int, end: int) -> None:
        """Remove ``[start, end)``, all of which must be in the set.

        Raises
        ------
        ValueError
            The range is empty or not all in the set.
        """
        if start >= end or not self.covers(start, end):
            raise ValueError(f"cannot remove [{start}, {end})")
        at = bisect_right(self._starts, start) - 1
        left = [(self._starts[at], start)] if self._starts[at] < start else []
        right = [(end, self._ends[at])] if end < self._ends[at] else []
        kept = left + right
        self._starts[at : at + 1] = [first for first, _ in kept]
        self._ends[at : at + 1] = [last for _, last in kept]

    def take_lowest(self, size: int) -> int:
        """Remove the lowest run of `size` integers and return its start. First fit: linear in the ranges too small.

        Raises
        ------
        ValueError
            No range is that long.
        """
        for start, end in self:
            if end - start >= size:
                self.remove(start, start + size)
                return start
        raise ValueError(f"no range of {size} is left")
