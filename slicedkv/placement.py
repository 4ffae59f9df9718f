"""Where handles go when pages are mapped: the records of what is asked for, and the arithmetic from them to runs.

Knows neither the pool nor any driver's calls; `backing` carries out what is laid out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from .references import Handles
from .reservation import Reservation
from .segments import Segments
from .vmm.base import Run

__all__ = ["Alias", "Cut", "Growth", "Piece", "Swap", "divide", "lay_out"]


class Growth(NamedTuple):
    """`pages` more pages per plane for a slot."""

    slot: int
    pages: int


class Alias(NamedTuple):
    """The first segments of slot `source`, to be mapped at the start of a slot that has nothing mapped."""

    slot: int
    source: int
    segments: Segments


class Cut(NamedTuple):
    """Pages ``[first_page, end_page)`` of a slot that are to be unmapped."""

    slot: int
    first_page: int
    end_page: int
    segments: Segments

    @property
    def pages(self) -> int:
        """Pages per plane."""
        return self.end_page - self.first_page


class Swap(NamedTuple):
    """A slot's segments ``[first, first + len(cut.segments.sizes))``, to be replaced by as many pages of its own."""

    cut: Cut
    first: int

    @property
    def pages(self) -> int:
        """Pages per plane."""
        return self.cut.pages


class Piece(NamedTuple):
    """Pages ``[page, page + pages)`` of a slot that get new handles."""

    slot: int
    page: int
    pages: int


class Division(NamedTuple):
    """Handles per plane for one piece."""

    extents: int
    pages: int


def divide(pieces: Sequence[Piece], extents: int, extent_pages: int) -> list[Division]:
    """Divide each piece into extents, as far as there are `extents` of them per plane, and pages."""
    found = []
    for *_, pages in pieces:
        count = min(pages // extent_pages, extents)
        extents -= count
        found.append(Division(count, pages - count * extent_pages))
    return found


def lay_out(
    reservations: Sequence[Reservation],
    pieces: Sequence[Piece],
    divisions: Sequence[Division],
    handles: Handles,
    extent_pages: int,
) -> tuple[list[Segments], list[Run]]:
    """Give each piece its handles: segments for the books, runs for the driver."""
    planes = len(reservations)
    sources = ((iter(handles.extents), extent_pages), (iter(handles.pages), 1))
    segments, runs = [], []
    for (slot, page, _), counts in zip(pieces, divisions, strict=True):
        added = Segments()
        for count, (source, handle_pages) in zip(counts, sources, strict=True):
            mine = list(islice(source, count * planes))
            for index, plane in enumerate(reservations if count else ()):
                runs.append(plane.run(slot, page, mine[index * count : (index + 1) * count], handle_pages))
            added.sizes.extend([handle_pages] * count)
            for nth in range(count):
                added.handles.extend(mine[nth::count])
            page += count * handle_pages
        segments.append(added)
    return segments, runs
