"""`SharedPages`: which slots of one cache have the same handles mapped, and what follows from that.

Slots share whole handles, at the same pages of each slot, at the start of their requests. What a slot shares lies below
a bound. Other slots may let go at any time, so the bound is tightened when somebody asks. Hold the gate's lock to call
anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby

from ..errors import StateError
from .change import Alias, Cut, Swap
from .references import References
from .segments import Segments

__all__ = ["Reckoning", "SharedPages"]


class SharedPages:
    """What the slots of one cache share.

    Parameters
    ----------
    segments : sequence of Segments
        What each slot has mapped; the owner keeps it up to date.
    references : References
    planes : int

    Attributes
    ----------
    alias_pages : int
        Mappings of pages over all planes, not counting the first of each page: mapped without memory of their own.
    """

    def __init__(self, segments: Sequence[Segments], references: References, planes: int) -> None:
        self._segments = segments
        self._references = references
        self._planes = planes
        self._bound = [0] * len(segments)  # no segment from here on is shared
        self.alias_pages = 0

    def add(self, alias: Alias) -> None:
        """Note that a slot has an alias mapped at its start."""
        self.alias_pages += alias.segments.pages * self._planes
        for slot in (alias.slot, alias.source):
            self._bound[slot] = max(self._bound[slot], len(alias.segments.sizes))

    def cut(self, slot: int, first: int) -> None:
        """Note that the segments from `first` on are gone."""
        self._bound[slot] = min(self._bound[slot], first)

    def loosen(self, slot: int) -> None:
        """Note that segments of a slot were replaced."""
        self._bound[slot] = len(self._segments[slot].sizes)

    # --- what is shared ---------------------------------------------------------------------------------------------

    def has(self, slot: int) -> bool:
        """True when a slot has pages mapped that another slot has too."""
        return self.bound(slot) > 0

    def end_page(self, slot: int) -> int:
        """Pages per plane at the start of a slot that hold all that it shares."""
        return sum(self._segments[slot].sizes[: self.bound(slot)])

    def _tighten(self, slot: int) -> int:
        end = self._bound[slot]
        while end and self._references.of(self.first_handle(slot, end - 1)) == 1:
            end -= 1
        self._bound[slot] = end
        return end

    def first_handle(self, slot: int, index: int) -> int:
        """The first plane's handle of a segment; all planes are shared alike."""
        return self._segments[slot].handles[index * self._planes]

    def mappings(self, slots: Iterable[int]) -> Counter[int]:
        """How often these slots map each handle of the first plane. All shared handles are there; others may be."""
        found: Counter[int] = Counter()
        for slot in filter(self.has, slots):
            found.update(self._segments[slot].handles[: self._bound[slot] * self._planes : self._planes])
        return found

    def spans(self, slots: Iterable[int], *, ignored: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
        """Slot, first and end page of every segment that these slots share.

        `ignored` are mappings of handles of the first plane that do not count.
        """
        for slot in filter(self.has, slots):
            end = 0
            for index, size in enumerate(self._segments[slot].sizes[: self._bound[slot]]):
                first, end = end, end + size
                handle = self.first_handle(slot, index)
                if self._references.of(handle) - ignored.get(handle, 0) > 1:
                    yield slot, first, end

    def saved_pages(self, slots: Iterable[int]) -> int:
        """Pages over all planes that these slots would map more if each had its own copy of what it shares."""
        found: set[int] = set()
        saved = 0
        for slot in filter(self.has, slots):
            for index, size in enumerate(self._segments[slot].sizes[: self._bound[slot]]):
                handle = self.first_handle(slot, index)
                saved += size * (handle in found)
                found.add(handle)
        return saved * self._planes

    def common_bytes(self, rows: Mapping[int, int], page_bytes: int) -> int:
        """Bytes per plane that a sum over slots counts twice, if each slot uses its first `rows[slot]` bytes."""
        counted: dict[int, int] = {}
        common = 0
        for slot in filter(self.has, rows):
            left = rows[slot]
            for index, size in enumerate(self._segments[slot].sizes[: self._bound[slot]]):
                filled, handle = min(max(left, 0), size * page_bytes), self.first_handle(slot, index)
                before = counted.get(handle, 0)
                common += min(filled, before)
                counted[handle] = max(filled, before)
                left -= filled
        return common

    def reckoning(self) -> Reckoning:
        """Begin to reckon what becomes free if slots let go of pages, one after another."""
        return Reckoning(self, self._segments, self._references)

    def bound(self, slot: int) -> int:
        """Segments at the start of a slot among which all shared ones are."""
        return self._tighten(slot) if self.alias_pages else 0

    def sources(self, swaps: Iterable[Swap], slots: Iterable[int]) -> dict[int, int]:
        """For each handle of the first plane that swaps replace, one of `slots` that keeps it, at the same pages."""
        pairs = {(handle, cut.slot) for cut, _ in swaps for handle in cut.segments.handles[:: self._planes]}
        replaced = {handle for handle, _ in pairs}
        return {
            handle: slot
            for slot in slots
            for handle in replaced.intersection(self._segments[slot].handles[:: self._planes])
            if (handle, slot) not in pairs
        }

    # --- what must be replaced before it is written -----------------------------------------------------------------

    def swaps(self, writes: Iterable[tuple[int, int, int]], ignored: Mapping[int, int]) -> list[Swap]:
        """What to replace so that each slot has pages of its own where it writes. The last sharer keeps the page.

        Parameters
        ----------
        writes : iterable of (int, int, int)
            Slot, first page, end page.
        ignored : mapping of int to int
            Mappings of handles of the first plane that do not count.
        """
        left = Counter({handle: -count for handle, count in ignored.items()})
        found: list[Swap] = []
        for slot, first_page, end_page in writes:
            shared: list[int] = []
            ends = list(accumulate(self._segments[slot].sizes[: self._tighten(slot)]))
            for index, end in enumerate(ends):
                handle = self.first_handle(slot, index)
                start = end - self._segments[slot].sizes[index]
                if start < end_page and first_page < end and self._references.of(handle) + left[handle] > 1:
                    left[handle] -= 1
                    shared.append(index)
            found.extend(self._joined(slot, shared, ends))
        return found

    def _joined(self, slot: int, shared: list[int], ends: list[int]) -> list[Swap]:
        """Swaps of neighbouring segments made one."""
        found: list[Swap] = []
        for _, group in groupby(enumerate(shared), lambda pair: pair[1] - pair[0]):
            indices = [index for _, index in group]
            segments = self._segments[slot].between(indices[0], indices[-1] + 1)
            end = ends[indices[-1]]
            found.append(Swap(Cut(slot, end - segments.pages, end, segments), indices[0]))
        return found

    def check_integrity(self) -> None:
        """Raise `StateError` if a handle is mapped at two places of slots, or is shared above a slot's bound."""
        places: dict[int, tuple[int, int]] = {}
        mapped = unique = 0
        for slot, segments in enumerate(self._segments):
            starts = [0, *accumulate(segments.sizes)]
            for index, handle in enumerate(segments.handles):
                segment, plane = divmod(index, self._planes)
                mapped += segments.sizes[segment]
                unique += segments.sizes[segment] * (handle not in places)
                if places.setdefault(handle, (plane, starts[segment])) != (plane, starts[segment]):
                    raise StateError(f"slot {slot}: handle {handle} is mapped at other pages in another slot")
                if self._references.of(handle) > 1 and segment >= self._bound[slot]:
                    raise StateError(f"slot {slot}: page {starts[segment]} is shared, but not on purpose")
        if mapped - unique != self.alias_pages:
            raise StateError(f"{mapped - unique} pages are aliases, but {self.alias_pages} are counted")


class Reckoning:
    """What becomes free if slots let go of pages, one after another. A page becomes free with its last mapping.

    It unmaps nothing, and is good only while the gate's lock is held.

    Parameters
    ----------
    shared : SharedPages
    segments : sequence of Segments
    references : References
    """

    def __init__(self, shared: SharedPages, segments: Sequence[Segments], references: References) -> None:
        self._shared = shared
        self._segments = segments
        self._references = references
        self._gone: Counter[int] = Counter()

    def drop(self, slot: int, pages: int, most: int | None = None) -> tuple[int, int]:
        """Let go of the last `pages` pages per plane of a slot, whole handles, until `most` pages would be exceeded.

        `pages` begin where a handle begins. `most` limits the pages per plane that become free.

        Returns
        -------
        (int, int)
            Pages per plane let go of; those of them that became free.
        """
        bound, most = self._shared.bound(slot), pages if most is None else most
        if not bound and pages <= most:
            return pages, pages
        dropped = freed = 0
        sizes = self._segments[slot].sizes
        for index in range(len(sizes) - 1, -1, -1):
            handle = self._shared.first_handle(slot, index) if index < bound else None
            kept = handle is not None and self._references.of(handle) - self._gone[handle] > 1
            if dropped + sizes[index] > pages or freed + (0 if kept else sizes[index]) > most:
                break
            if handle is not None:
                self._gone[handle] += 1
            dropped += sizes[index]
            freed += 0 if kept else sizes[index]
        return dropped, freed
