"""`Segments`: what a slot has mapped, as numbers in arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import accumulate, groupby

from ..vmm.base import Run
from .references import Handles

__all__ = ["Segments"]


class Segments:
    """A stretch of a slot's mapping, segment by segment. A segment is one handle in every plane.

    A cache has a hundred thousand segments. They are numbers in arrays, since with that many objects the garbage
    collector would stop the interpreter for long.

    Attributes
    ----------
    sizes : array of int
        Pages of each segment.
    handles : array of int
        Its handles, one a plane, segment after segment.
    """

    __slots__ = ("handles", "sizes")

    def __init__(self) -> None:
        self.sizes = array("Q")
        self.handles = array("Q")

    @property
    def pages(self) -> int:
        """Pages per plane."""
        return sum(self.sizes)

    @property
    def planes(self) -> int:
        """Handles of one segment."""
        return len(self.handles) // max(1, len(self.sizes))

    def extend(self, other: Segments) -> None:
        """Append segments at the end."""
        self.sizes.extend(other.sizes)
        self.handles.extend(other.handles)

    def between(self, first: int, end: int) -> Segments:
        """Return a copy of segments ``[first, end)``."""
        found, planes = Segments(), self.planes
        found.sizes, found.handles = self.sizes[first:end], self.handles[first * planes : end * planes]
        return found

    def straddled(self, pages: int) -> tuple[int, int]:
        """First and end page of the segment that lies on both sides of page `pages`; ``(pages, pages)`` if none does.

        While the first `pages` pages are needed, all of that segment stays mapped.
        """
        end = 0
        for size in self.sizes if len(self.sizes) < self.pages else ():  # pages alone straddle nothing
            begin, end = end, end + size
            if begin < pages < end:
                return begin, end
        return pages, pages

    def within(self, pages: int) -> Segments:
        """Return a copy of the segments that lie wholly in the first `pages` pages."""
        return self.between(0, sum(end <= pages for end in accumulate(self.sizes)))

    def split(self, first: int) -> Segments:
        """Remove and return the segments from `first` on."""
        tail = self.between(first, len(self.sizes))
        self.replace(first, len(self.sizes), Segments())
        return tail

    def replace(self, first: int, end: int, others: Segments) -> None:
        """Put other segments in the place of ``[first, end)``."""
        planes = self.planes
        self.sizes[first:end] = others.sizes
        self.handles[first * planes : end * planes] = others.handles

    def by_size(self) -> Handles:
        """All handles, pages and extents apart."""
        planes = self.planes
        found = Handles([], [])
        for index, size in enumerate(self.sizes):
            target = found.pages if size == 1 else found.extents
            target.extend(self.handles[index * planes : (index + 1) * planes])
        return found

    def runs(self, plane: int, address: int, page_bytes: int) -> Iterator[Run]:
        """Runs that map one plane's handles side by side from `address`."""
        handles, first = self.handles[plane :: self.planes], 0
        for size, group in groupby(self.sizes):
            count = len(list(group))
            yield Run(address, handles[first : first + count], size * page_bytes)
            address += count * size * page_bytes
            first += count
