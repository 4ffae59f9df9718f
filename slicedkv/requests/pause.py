"""`Pauser`: a cache gives its memory back to the driver and takes it again, at the same addresses.

A pause gives back what `trim` does. With `offload` the rows of active requests go to host memory, too; their slots keep
lengths and addresses but no pages. `resume` maps pages there again and copies the rows in. Requests that share pages go
with all their rows and come back sharing none, so they may need more memory than they had.

While a cache is paused, its mapper rests and calls that would change something are refused (`CacheState.paused`). Two
are not, since they make room for `resume`: ending a request and moving the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import StateError
from ..memory.change import Change, Growth
from ..memory.host_pool import HostSpan
from ..paging.growth import grow_now
from ..paging.mapper import Mapper
from ..paging.reclaim import trim_slots
from ..state.cache_state import CacheState
from ..state.protection import changing
from .row_mover import RowMover

__all__ = ["Pauser"]

Rows = Sequence[tuple[int, HostSpan, int]]


class Pauser:
    """Pause and resume one cache.

    Parameters
    ----------
    state : CacheState
    mapper : Mapper
    mover : RowMover
    """

    def __init__(self, state: CacheState, mapper: Mapper, mover: RowMover) -> None:
        self._state = state
        self._mapper = mapper
        self._mover = mover

    def pause(self, *, offload: bool) -> int:
        """Give memory back and return its bytes; see `SlicedKVCache.pause`."""
        state, pool = self._state, self._state.pool
        with state.work("pause"):
            pool.driver.record_fence()  # refuses a capture, which waiting for the device would break
            created = pool.created_pages
            with state.gate.lock:
                state.paused = True  # from here on no step counts on pages, and nobody comes, grows or goes
                lens = self._lens() if offload else {}
            rows: Rows = ()
            try:
                rows = self._take_spans(lens)
                pool.driver.synchronize()
                trim_slots(state)
                self._offload(rows)
                pool.trim()
            except BaseException as error:
                self._undo(rows, error)
                raise
            return (created - pool.created_pages) * pool.page_bytes

    def _lens(self) -> dict[int, int]:
        """Tokens of every active slot that has pages. Lock held."""
        state = self._state
        return {slot: state.lengths.longest[slot] for slot in sorted(state.slots.active) if state.backing.mapped(slot)}

    def _take_spans(self, lens: Mapping[int, int]) -> Rows:
        """Host memory for the rows of slots."""
        spans = self._state.host.take([self._mover.num_bytes(seq_len) for seq_len in lens.values()])
        return tuple((slot, span, seq_len) for (slot, seq_len), span in zip(lens.items(), spans, strict=True))

    def _offload(self, rows: Rows) -> None:
        """Copy rows out and unmap their slots."""
        state = self._state
        if not rows:
            return
        self._mover.copy_out(rows)
        if not state.host.wait(*(span for _, span, _ in rows)):
            raise StateError("pause: the copies to host memory did not end in time; nothing was unmapped")
        self._unmap([slot for slot, _, _ in rows])
        with state.gate.lock:
            state.offloaded = {slot: span for slot, span, _ in rows}

    def _unmap(self, slots: Sequence[int]) -> None:
        """Unmap all pages of active slots, or none; the device does not use them."""
        state = self._state
        with state.gate.lock:
            state.slots.clear_fences(slots)
            cuts = [cut for slot in slots if (cut := state.backing.detach(slot, 0)) is not None]
        with changing(state.protector, *cuts):
            try:
                state.backing.unmap(*cuts)
            except StateError:
                with state.gate.lock:
                    for slot in slots:
                        state.lose(slot)
                raise
            finally:
                with state.gate.lock:
                    for slot in slots:
                        state.clean_pages[slot] = min(state.clean_pages[slot], state.backing.mapped(slot))
                        state.note_mapped(slot)
                        state.note_shared(slot)

    def _undo(self, rows: Rows, error: BaseException) -> None:
        """Be as before a pause that failed; where even that fails, stay paused with the rows in host memory."""
        if self._state.offloaded:
            try:
                self._restore(rows)
            except Exception as second:
                raise StateError(
                    f"pause: {error}; then {second}. The requests' rows are in host memory and the cache stays paused; "
                    "call resume() to bring them back"
                ) from error
        self._go_on(rows)

    def resume(self) -> None:
        """Map pages for what was offloaded and copy the rows in; see `SlicedKVCache.resume`."""
        state = self._state
        with state.work("resume", paused=True):
            if not state.paused:
                raise StateError("the cache is not paused; there is nothing to resume")
            rows = [(slot, span, state.lengths.longest[slot]) for slot, span in state.offloaded.items()]
            self._restore(rows)
            self._go_on(rows)

    def _restore(self, rows: Rows) -> None:
        """Map pages behind slots again and copy their rows in; all or nothing."""
        state, free_before = self._state, self._state.pool.free_pages
        lens = {slot: seq_len for slot, _, seq_len in rows if seq_len}
        if not lens:
            return
        # A restore that failed may have left pages there.
        missing = {slot: state.layout.pages_for(seq_len) - state.backing.mapped(slot) for slot, seq_len in lens.items()}
        growths = tuple(Growth(slot, pages) for slot, pages in missing.items() if pages > 0)
        if growths:
            grow_now(state, Change(growths))
        try:
            self._mover.copy_in(rows)
        except BaseException:
            state.pool.driver.synchronize()  # zeroing may be under way
            self._unmap(list(lens))
            state.pool.trim(free_before)
            raise

    def _go_on(self, rows: Rows) -> None:
        state = self._state
        with state.gate.lock:
            state.paused = False
            state.offloaded = {}
            self._mapper.wake()
        for _, span, _ in rows:
            state.host.give_back(span)
