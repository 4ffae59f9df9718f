"""Where handles go when pages are mapped: the arithmetic from pieces of slots to segments and runs.

`backing` carries out what is laid out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from ..vmm.base import Run
from .references import Handles
from .reservation import Reservation
from .segments import Segments

__all__ = ["Piece", "divide", "lay_out"]


class Piece(NamedTuple):
    """Pages ``[page, page + pages)`` of a slot that get new handles."""

    slot: int
    page: int
    pages: int


class Division(NamedTuple):
    """Handles per plane for one piece."""

    pages: int
    extents: int


def divide(pieces: Sequence[Piece], extents: int, extent_pages: int) -> list[Division]:
    """Divide each piece into extents, as long as the `extents` per plane last, and pages."""
    found = []
    for *_, pages in pieces:
        count = min(pages // extent_pages, extents)
        extents -= count
        found.append(Division(pages=pages - count * extent_pages, extents=count))
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
    spare_pages, spare_extents = iter(handles.pages), iter(handles.extents)
    segments, runs = [], []
    for (slot, page, _), division in zip(pieces, divisions, strict=True):
        added = Segments()
        in_order = ((division.extents, spare_extents, extent_pages), (division.pages, spare_pages, 1))
        for count, source, handle_pages in in_order:
            mine = list(islice(source, count * planes))
            for index, plane in enumerate(reservations if count else ()):
                runs.append(plane.run(slot, page, mine[index * count : (index + 1) * count], handle_pages))
            added.sizes.extend([handle_pages] * count)
            for nth in range(count):
                added.handles.extend(mine[nth::count])
            page += count * handle_pages
        segments.append(added)
    return segments, runs
