"""What one driver batch changes, as records: pages to map, pages to map once more, pages to unmap or to replace.

Callers build a `Change`, `growth` and `backing` carry it out. Knows slots and pages as numbers; it knows no pool, no
lengths and no driver's calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .segments import Segments

__all__ = ["Alias", "Change", "Cut", "Growth", "Swap"]


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


@dataclass(frozen=True, slots=True)
class Change:
    """One batch: the driver makes all of it or nothing.

    Attributes
    ----------
    growths : sequence of Growth
        They map new pages. The growth of a slot comes after its alias.
    aliases : sequence of Alias
        They map pages of another slot once more.
    swaps : sequence of Swap
        They replace shared pages by new ones.
    """

    growths: Sequence[Growth] = ()
    aliases: Sequence[Alias] = ()
    swaps: Sequence[Swap] = ()

    def __bool__(self) -> bool:
        return bool(self.growths or self.aliases or self.swaps)

    @property
    def pages(self) -> int:
        """Pages per plane that the pool must give for it; aliases need none."""
        return sum(growth.pages for growth in self.growths) + sum(swap.pages for swap in self.swaps)
