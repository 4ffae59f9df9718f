"""`Segments`: what a slot has mapped, as numbers in arrays. Knows neither slots, lengths nor drivers' calls."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from .page_pool import Handles
from .vmm.base import MappedRange, Run

__all__ = ["Segments", "runs_over"]


class Segments:
    """Part of a slot's mapping in order: segments of one handle in every plane.

    Numbers in arrays, not objects in lists: a cache holds a hundred thousand of them, and each object would make the
    garbage collector stop the interpreter longer.

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

    def extend(self, other: Segments) -> None:
        """Append segments at the end."""
        self.sizes.extend(other.sizes)
        self.handles.extend(other.handles)

    def split(self, first: int) -> Segments:
        """Remove and return the segments from `first` on."""
        tail, cut = Segments(), first * (len(self.handles) // max(1, len(self.sizes)))
        tail.sizes, tail.handles = self.sizes[first:], self.handles[cut:]
        del self.sizes[first:], self.handles[cut:]
        return tail

    def by_size(self) -> Handles:
        """All handles, pages and extents apart."""
        planes = len(self.handles) // max(1, len(self.sizes))
        found = Handles([], [])
        for index, size in enumerate(self.sizes):
            target = found.pages if size == 1 else found.extents
            target.extend(self.handles[index * planes : (index + 1) * planes])
        return found


def runs_over(ranges: Sequence[MappedRange], segments: Segments, page_bytes: int) -> Iterator[Run]:
    """Runs of one handle each that map `segments` into the ranges of the first planes."""
    planes = len(segments.handles) // len(segments.sizes)
    for plane, mapped in enumerate(ranges):
        address = mapped.address
        for size, handle in zip(segments.sizes, segments.handles[plane::planes], strict=True):
            yield Run(address, (handle,), size * page_bytes)
            address += size * page_bytes
