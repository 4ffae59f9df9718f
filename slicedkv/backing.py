"""`Backing`: which handles lie behind each slot, and the two operations that change it, grow and unmap.

All planes of a slot are mapped alike: the same number of pages, made of the same segments (pages and extents), so a
slot's mapping is one prefix ``[0, n)`` in every plane. Both operations are one driver batch over all slots and planes,
are all or nothing, and are made by whoever holds the gate's work token (*token*). Knows no lengths, states or policy.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from .errors import DriverError, OutOfPagesError, StateError
from .layout import KVLayout
from .page_pool import Handles, PagePool
from .reservation import Reservation
from .segments import Segments, runs_over
from .vmm.base import Run

__all__ = ["Backing", "Cut", "Growth"]


class Growth(NamedTuple):
    """`pages` more pages per plane for a slot."""

    slot: int
    pages: int


class Cut(NamedTuple):
    """Pages ``[first_page, end_page)`` of a slot, struck off the books and about to be unmapped."""

    slot: int
    first_page: int
    end_page: int
    segments: Segments


class Backing:
    """Physical memory behind the slots of one cache.

    Parameters
    ----------
    layout : KVLayout
    pool : PagePool
    """

    def __init__(self, layout: KVLayout, pool: PagePool) -> None:
        self.layout = layout
        self.pool = pool
        self.reservations = [
            Reservation(
                pool.driver,
                num_slots=layout.max_batch_size,
                slot_bytes=layout.slot_stride_bytes,
                page_bytes=layout.page_bytes,
            )
            for _ in range(layout.num_planes)
        ]
        self._segments = [Segments() for _ in range(layout.max_batch_size)]
        self._mapped = [0] * layout.max_batch_size
        pool.attach(self)

    def mapped(self, slot: int) -> int:
        """Pages per plane mapped for a slot."""
        return self._mapped[slot]

    @property
    def mapped_pages(self) -> int:
        """Pages mapped over all slots and planes; a page mapped twice counts twice."""
        return sum(self._mapped) * self.layout.num_planes

    def mapped_handles(self) -> Iterator[int]:
        """Every handle, once per mapping."""
        for segments in self._segments:
            yield from segments.handles

    def grow(self, growths: Sequence[Growth]) -> int:
        """*token* Map more pages behind several slots in one driver batch; return the number of extents used.

        Raises
        ------
        OutOfPagesError, DriverError
            Nothing was mapped, and the pool holds what it held before.
        """
        free_before = self.pool.free_pages
        plan = self._plan(growths)
        planes = self.layout.num_planes
        handles = self.pool.take(
            pages=sum(pages for *_, pages in plan) * planes, extents=sum(extents for _, extents, _ in plan) * planes
        )
        segments, runs = self._lay_out(plan, handles)
        try:
            self._map(runs)
        except BaseException:
            with self.pool.gate.lock:
                self.pool.give_back(handles)
            self.pool.trim(free_before)
            raise
        with self.pool.gate.lock:
            for (slot, _), added in zip(growths, segments, strict=True):
                self._segments[slot].extend(added)
                self._mapped[slot] += sum(added.sizes)
        return len(handles.extents)

    def _map(self, runs: Sequence[Run]) -> None:
        """Map runs; when the driver is short of memory for it, ask its other users once to make room."""
        driver = self.pool.driver
        try:
            try:
                driver.map_batch(runs)
            except DriverError as error:
                if not error.out_of_memory or not driver.relieve_pressure():
                    raise
                driver.map_batch(runs)
        except DriverError as error:
            if not error.out_of_memory:
                raise
            pages = sum(len(run.handles) * run.handle_bytes for run in runs) // self.pool.page_bytes
            raise OutOfPagesError(f"mapping {pages} pages: {error}", requested=pages, available=0) from error

    def _plan(self, growths: Sequence[Growth]) -> list[tuple[int, int, int]]:
        """Divide each growth into extents, as far as there are some, and pages: ``(slot, extents, pages)``."""
        extent_pages = self.pool.extent_pages
        left = self.pool.obtainable_extents // self.layout.num_planes
        plan = []
        for slot, pages in growths:
            extents = min(pages // extent_pages, left)
            left -= extents
            plan.append((slot, extents, pages - extents * extent_pages))
        return plan

    def _lay_out(self, plan: Iterable[tuple[int, int, int]], handles: Handles) -> tuple[list[Segments], list[Run]]:
        """Give each slot its handles: segments for the books, runs for the driver."""
        planes = len(self.reservations)
        sources = ((handles.extents, self.pool.extent_pages), (handles.pages, 1))
        used = [0, 0]
        segments, runs = [], []
        for slot, *counts in plan:
            added, page = Segments(), self._mapped[slot]
            for kind, count in enumerate(counts):
                source, handle_pages = sources[kind]
                mine = source[used[kind] : used[kind] + count * planes]
                used[kind] += len(mine)
                for index, plane in enumerate(self.reservations if count else ()):
                    runs.append(plane.run(slot, page, mine[index * count : (index + 1) * count], handle_pages))
                added.sizes.extend([handle_pages] * count)
                for nth in range(count):
                    added.handles.extend(mine[nth::count])
                page += count * handle_pages
            segments.append(added)
        return segments, runs

    def shrinkable(self, slot: int, keep_pages: int) -> int:
        """Pages per plane that `detach` would strike off: whole segments from the end."""
        return self._mapped[slot] - self._cut(slot, keep_pages)[1]

    def _cut(self, slot: int, keep_pages: int) -> tuple[int, int]:
        """First segment that may go, and the pages before it."""
        sizes = self._segments[slot].sizes
        first, keep = len(sizes), self._mapped[slot]
        while first and keep - sizes[first - 1] >= keep_pages:
            first -= 1
            keep -= sizes[first]
        return first, keep

    def detach(self, slot: int, keep_pages: int) -> Cut | None:
        """Strike whole segments from a slot's end off the books, ready to be unmapped. Call with the lock held.

        From here on nobody counts on these pages; `unmap` must follow.
        """
        first, keep = self._cut(slot, keep_pages)
        end = self._mapped[slot]
        if keep == end:
            return None
        segments = self._segments[slot].split(first)
        self._mapped[slot] = keep
        return Cut(slot, keep, end, segments)

    def unmap(self, *cuts: Cut) -> int:
        """*token* Unmap what `detach` struck off, all or nothing; return the pages that became free, over all planes.

        The caller has made sure that no work that uses them is left on the device.

        Raises
        ------
        DriverError
            The pages are mapped, and on the books, as before.
        StateError
            The driver failed twice, in unmapping and in mapping back: what the slots have mapped is unknown. It is on
            the books as before; the slots must not be used again.
        """
        try:
            self._unmap(cuts)
        except BaseException:
            with self.pool.gate.lock:
                for cut in cuts:
                    self._segments[cut.slot].extend(cut.segments)
                    self._mapped[cut.slot] = cut.end_page
            raise
        with self.pool.gate.lock:
            return sum(self.pool.give_back(cut.segments.by_size()) for cut in cuts)

    def _unmap(self, cuts: Sequence[Cut]) -> None:
        """Unmap ranges in every plane; on failure map what was unmapped back."""
        planes = len(self.reservations)
        ranges = [p.mapped_range(cut.slot, cut.first_page, cut.end_page) for cut in cuts for p in self.reservations]
        try:
            self.pool.driver.unmap_batch(ranges)
        except DriverError as error:
            runs: list[Run] = []
            for index, cut in enumerate(cuts):
                done = ranges[index * planes : min((index + 1) * planes, error.completed)]
                runs.extend(runs_over(done, cut.segments, self.layout.page_bytes))
            try:
                self.pool.driver.map_batch(runs)
            except DriverError as second:
                pages = ", ".join(f"reqid {cut.slot}: pages [{cut.first_page}, {cut.end_page})" for cut in cuts)
                raise StateError(
                    f"{pages} could neither be unmapped nor mapped back ({second}); out of use until the cache is "
                    "closed"
                ) from error
            raise

    def unmap_all(self, unknown: Container[int] = ()) -> None:
        """*token* Unmap everything, going on after failures; the first failure is raised at the end.

        In slots that are `unknown` some of what is on the books may not be mapped: there, failures are expected.
        """
        failure: Exception | None = None
        for slot in range(len(self._mapped)):
            with self.pool.gate.lock:
                cut = self.detach(slot, 0)
            if cut is not None and slot in unknown:
                self._unmap_unknown(cut)
            elif cut is not None:
                try:
                    self.unmap(cut)
                except (DriverError, StateError) as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _unmap_unknown(self, cut: Cut) -> None:
        """Unmap whatever is mapped of a range, handle by handle, and take all its handles back."""
        planes = [[plane.mapped_range(cut.slot, cut.first_page, cut.end_page)] for plane in self.reservations]
        for index, whole in enumerate(planes):
            alone = Segments()
            alone.sizes, alone.handles = cut.segments.sizes, cut.segments.handles[index :: len(planes)]
            for run in runs_over(whole, alone, self.layout.page_bytes):
                with suppress(DriverError):
                    self.pool.driver.unmap_run(run.address, run.handle_bytes)
        with self.pool.gate.lock:
            self.pool.give_back(cut.segments.by_size())

    def check_integrity(self) -> None:
        """Raise `StateError` if a slot's books disagree with each other. Call with the lock held."""
        for slot, (segments, mapped) in enumerate(zip(self._segments, self._mapped, strict=True)):
            if sum(segments.sizes) != mapped:
                raise StateError(f"slot {slot}: segments do not add up to its {mapped} mapped pages")
            if mapped > self.layout.pages_per_slot:
                raise StateError(f"slot {slot}: {mapped} pages mapped, more than its {self.layout.pages_per_slot}")
            if len(segments.handles) != len(segments.sizes) * self.layout.num_planes:
                raise StateError(f"slot {slot}: a segment is not mapped in every plane")
