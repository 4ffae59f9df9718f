"""`Backing`: which handles lie behind each slot, and the two operations that change it: grow and unmap.

All planes of a slot are mapped alike, with the same segments (pages and extents). So a slot's mapping is one range of
pages ``[0, n)`` in every plane. Slots may share handles: whole ones, at the same pages of each.

Each operation is one driver batch over all slots and planes. It does all or nothing, and needs the gate's work token
(*token*). Lengths and policy are others' business.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress

from ..errors import DriverError, LostSlotsError, StateError
from ..layout import KVLayout
from ..vmm.base import MappedRange, Run
from .change import Alias, Change, Cut, Swap
from .page_pool import PagePool
from .placement import Piece, divide, lay_out
from .reservation import Reservation, map_runs
from .segments import Segments
from .shared_pages import SharedPages

__all__ = ["Backing"]


class Backing:
    """Physical memory behind the slots of one cache.

    Parameters
    ----------
    layout : KVLayout
    pool : PagePool

    Attributes
    ----------
    shared : SharedPages
        Which slots have the same handles mapped.
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
        self._leaving = 0  # pages per plane struck off and not unmapped yet
        self.shared = SharedPages(self._segments, pool.references, layout.num_planes)

    def mapped(self, slot: int) -> int:
        """Pages per plane mapped for a slot."""
        return self._mapped[slot]

    @property
    def held_pages(self) -> int:
        """Pages of memory behind all slots and planes, each once, those about to be unmapped, too. Lock held."""
        return sum(self._mapped) * self.layout.num_planes - self.shared.alias_pages + self.leaving_pages

    @property
    def leaving_pages(self) -> int:
        """Pages over all planes that are off the books and not unmapped yet, shared ones, too. Lock held."""
        return self._leaving * self.layout.num_planes

    def mapped_handles(self) -> Iterator[int]:
        """Every handle, once per mapping."""
        for segments in self._segments:
            yield from segments.handles

    def segment_spans(self, slot: int) -> Iterator[tuple[int, int]]:
        """First and end page of every segment of a slot. Lock held."""
        end = 0
        for size in self._segments[slot].sizes:
            first, end = end, end + size
            yield first, end

    # --- mapping --------------------------------------------------------------------------------------------------

    def first_segments(self, slot: int, pages: int) -> Segments:
        """A copy of the segments that lie wholly in the first `pages` pages of a slot. Lock held."""
        return self._segments[slot].within(pages)

    def grow(self, change: Change) -> int:
        """*token* Map what a change asks for in one driver batch; return the number of extents used.

        Before swaps, the caller has waited for all device work that uses the pages. Afterwards it copies what they held
        from another slot that has them mapped.

        Raises
        ------
        OutOfPagesError, DriverError
            Nothing was mapped, and the pool holds what it held before.
        LostSlotsError
            What these slots have mapped is unknown, see `unmap`.
        """
        free_before = self.pool.free_pages
        pieces = self._pieces(change)
        planes, extent_pages = self.layout.num_planes, self.pool.extent_pages
        divisions = divide(pieces, self.pool.available_extents // planes, extent_pages)
        handles = self.pool.take(planes * sum(d.pages for d in divisions), planes * sum(d.extents for d in divisions))
        failure: DriverError | None = None
        try:
            segments, runs = lay_out(self.reservations, pieces, divisions, handles, extent_pages)
            self._exchange([swap.cut for swap in change.swaps], [*self._alias_runs(change.aliases), *runs])
        except BaseException as error:
            if not (isinstance(error, DriverError) and error.left_behind):
                with self.pool.gate.lock:
                    self.pool.give_back(handles)
                self.pool.trim(free_before)
                raise
            failure = error
        with self.pool.gate.lock:
            self._note_aliases(change.aliases)
            for (slot, _), added in zip(change.growths, segments, strict=False):
                self._segments[slot].extend(added)
                self._mapped[slot] += added.pages
            self._note_swaps(change.swaps, segments[len(change.growths) :])
        if failure is not None:
            slots = sorted({piece.slot for piece in pieces} | {alias.slot for alias in change.aliases})
            message = f"reqids {slots} could neither be mapped nor left as they were ({failure})"
            raise LostSlotsError(f"{message}; out of use until the cache is closed", tuple(slots)) from failure
        return len(handles.extents)

    def _pieces(self, change: Change) -> list[Piece]:
        """What needs new handles, and from which page on."""
        ahead = {alias.slot: alias.segments.pages for alias in change.aliases}
        pieces = [Piece(slot, self._mapped[slot] + ahead.get(slot, 0), pages) for slot, pages in change.growths]
        return [*pieces, *(Piece(swap.cut.slot, swap.cut.first_page, swap.pages) for swap in change.swaps)]

    def _alias_runs(self, aliases: Iterable[Alias]) -> Iterator[Run]:
        """What maps the segments of aliases at the start of their slots."""
        for slot, _, segments in aliases:
            for _, runs in self._ranges(Cut(slot, 0, segments.pages, segments)):
                yield from runs

    def _note_aliases(self, aliases: Iterable[Alias]) -> None:
        for alias in aliases:
            self.pool.references.add(alias.segments.by_size())
            self._segments[alias.slot].extend(alias.segments)
            self._mapped[alias.slot] += alias.segments.pages
            self.shared.add(alias)

    def _note_swaps(self, swaps: Sequence[Swap], segments: Sequence[Segments]) -> None:
        # From the end of a slot, so that the places of the others stay right.
        for swap, added in reversed(list(zip(swaps, segments, strict=True))):
            slot, old = swap.cut.slot, swap.cut.segments
            self._segments[slot].replace(swap.first, swap.first + len(old.sizes), added)
            self.shared.loosen(slot)
            self._give_back(swap.cut)

    def _give_back(self, cut: Cut) -> int:
        """Return the handles of what was unmapped, and the pages that became free. Lock held."""
        freed = self.pool.give_back(cut.segments.by_size())
        self.shared.alias_pages -= cut.pages * self.layout.num_planes - freed
        return freed

    def _exchange(self, cuts: Sequence[Cut], runs: Sequence[Run]) -> None:
        """Unmap cuts, then map runs. On failure the cuts are mapped as before."""
        self._unmap(cuts)
        try:
            map_runs(self.pool.driver, runs, self.pool.page_bytes)
        except BaseException as error:
            if isinstance(error, DriverError) and error.left_behind:
                raise
            self._map_back(cuts, [again for cut in cuts for _, again in self._ranges(cut)], error)
            raise

    # --- unmapping ------------------------------------------------------------------------------------------------

    def shrinkable(self, slot: int, keep_pages: int) -> int:
        """Pages per plane that `detach` would take off the books: whole segments from the end."""
        return self._mapped[slot] - (self._cut(slot, keep_pages)[1] if keep_pages else 0)

    def straddled(self, slot: int, pages: int) -> tuple[int, int]:
        """See `Segments.straddled`; quicker where pages suffice."""
        return self._segments[slot].straddled(pages) if pages < self._mapped[slot] else (pages, pages)

    def _cut(self, slot: int, keep_pages: int) -> tuple[int, int]:
        """First segment that may go, and the pages before it."""
        sizes = self._segments[slot].sizes
        first, keep = len(sizes), self._mapped[slot]
        while first and keep - sizes[first - 1] >= keep_pages:
            first -= 1
            keep -= sizes[first]
        return first, keep

    def detach(self, slot: int, keep_pages: int) -> Cut | None:
        """Take whole segments from a slot's end off the books. Lock held.

        From here on nobody counts on these pages, and the caller unmaps them with `unmap`.
        """
        first, keep = self._cut(slot, keep_pages)
        end = self._mapped[slot]
        if keep == end:
            return None
        segments = self._segments[slot].split(first)
        self._mapped[slot] = keep
        self.shared.cut(slot, first)
        self._leaving += end - keep
        return Cut(slot, keep, end, segments)

    def unmap(self, *cuts: Cut) -> int:
        """*token* Unmap what `detach` returned, all or nothing; return the pages that became free, over all planes.

        The caller has waited for all device work that uses them.

        Raises
        ------
        DriverError
            The pages are mapped, and on the books, as before.
        LostSlotsError
            The driver failed again in mapping back: nobody knows what the slots have mapped. The books are as before,
            and the slots must not be used again.
        """
        try:
            self._unmap(cuts)
        except BaseException:
            with self.pool.gate.lock:
                for cut in cuts:
                    self._segments[cut.slot].extend(cut.segments)
                    self._mapped[cut.slot] = cut.end_page
                    self.shared.loosen(cut.slot)
                    self._leaving -= cut.pages
            raise
        with self.pool.gate.lock:
            self._leaving -= sum(cut.pages for cut in cuts)
            return sum(map(self._give_back, cuts))

    def _unmap(self, cuts: Sequence[Cut]) -> None:
        """Unmap ranges in every plane; on failure map those already done back."""
        if not cuts:
            return
        ranges = [part for cut in cuts for part in self._ranges(cut)]
        try:
            self.pool.driver.unmap_batch([mapped for mapped, _ in ranges])
        except DriverError as error:
            self._map_back(cuts, [again for _, again in ranges[: error.completed]], error)
            raise

    def _map_back(self, cuts: Sequence[Cut], runs: Sequence[Sequence[Run]], error: BaseException) -> None:
        try:
            self.pool.driver.map_batch([run for again in runs for run in again])
        except DriverError as second:
            places = ", ".join(f"reqid {cut.slot}: pages [{cut.first_page}, {cut.end_page})" for cut in cuts)
            raise LostSlotsError(
                f"{places} could neither be unmapped nor mapped back ({second}); out of use until the cache is closed",
                tuple(cut.slot for cut in cuts),
            ) from error

    def _ranges(self, cut: Cut) -> Iterator[tuple[MappedRange, list[Run]]]:
        """In every plane, the range of a cut and the runs that map it."""
        slot, first, end, segments = cut
        for index, plane in enumerate(self.reservations):
            mapped = plane.mapped_range(slot, first, end)
            yield mapped, list(segments.runs(index, mapped.address, self.layout.page_bytes))

    def unmap_all(self, unknown: Container[int] = ()) -> None:
        """*token* Unmap everything. After a failure it goes on, and raises the first one at the end.

        In slots that are `unknown`, some pages of the books may not be mapped: failures there do not count.
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
        for _, runs in self._ranges(cut):
            for address, handles, handle_bytes in runs:
                for nth in range(len(handles)):
                    with suppress(DriverError):
                        self.pool.driver.unmap_run(address + nth * handle_bytes, handle_bytes)
        with self.pool.gate.lock:
            self._leaving -= cut.pages
            self._give_back(cut)

    def check_integrity(self) -> None:
        """Raise `StateError` if a slot's books disagree with each other. Call with the lock held."""
        self.shared.check_integrity()
        if self._leaving:
            raise StateError(f"{self._leaving} pages per plane were struck off and neither unmapped nor put back")
        for slot, (segments, mapped) in enumerate(zip(self._segments, self._mapped, strict=True)):
            if sum(segments.sizes) != mapped:
                raise StateError(f"slot {slot}: segments do not add up to its {mapped} mapped pages")
            if mapped > self.layout.pages_per_slot:
                raise StateError(f"slot {slot}: {mapped} pages mapped, more than its {self.layout.pages_per_slot}")
            if len(segments.handles) != len(segments.sizes) * self.layout.num_planes:
                raise StateError(f"slot {slot}: a segment is not mapped in every plane")
