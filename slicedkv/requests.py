"""`Requests`: giving slots to requests and taking them back, with all the books that belong to it.

Arguments are checked by the cache. Nothing here maps, and only what a new request must not keep of its slot's pages is
unmapped: those that other slots share, and the part of an extent that would be stranded. The mapper is told that there
may be work.
"""

from __future__ import annotations

from contextlib import nullcontext

from .errors import OutOfSlotsError
from .mapper import Mapper
from .planner import Planner
from .reclaim import reclaim_slot
from .state import CacheState
from .vmm.base import Fence

__all__ = ["Requests"]

_LOOK_AGAIN = -1


class Requests:
    """Begin and end requests of one cache.

    Parameters
    ----------
    state : CacheState
    planner : Planner
    mapper : Mapper
    """

    def __init__(self, state: CacheState, planner: Planner, mapper: Mapper) -> None:
        self._state = state
        self._planner = planner
        self._mapper = mapper

    def begin(self, seq_len: int, *, told: bool = True) -> int:
        """Activate the slot that suits `seq_len` tokens best; see `SlicedKVCache.alloc_reqid`.

        With `told` the mapper maps them. Otherwise the caller, who holds the work token, does, or calls `undo_begin`.
        """
        state = self._state
        pages = state.layout.pages_for(seq_len)
        while True:
            with state.gate.lock:
                state.require_running()
                found = state.best_fit(pages)
                keep = self._keep(found, pages)
                if found is None or keep is None:
                    slot = self._activate(found)
                    if seq_len and told:
                        state.wanted[slot] = pages
                        self._planner.note_prompt(seq_len)
                    self._mapper.wake()
                    return slot
            with state.work("alloc_reqid") if told else nullcontext():
                if keep != _LOOK_AGAIN:
                    reclaim_slot(state, found, wait=True, keep_pages=keep)

    def _keep(self, slot: int | None, pages: int) -> int | None:
        """Pages per plane of an idle slot to keep when more must go before it is handed out; None if nothing must.

        What it shares must go; what would be stranded must if nothing has to be waited for. That is known when the
        mapper is done with the slot: `_LOOK_AGAIN` says to wait for it and choose anew. Lock held.
        """
        state = self._state
        if slot is None:
            return None
        if pages and state.is_growing(slot):
            return _LOOK_AGAIN
        if state.backing.shared.has(slot):
            return 0
        usable = state.usable_pages(slot, pages)
        return usable if usable < state.backing.mapped(slot) and state.is_over(slot) else None

    def begin_empty(self, count: int) -> list[int]:
        """Activate `count` slots that have as little mapped as can be found. Lock held.

        Raises
        ------
        OutOfSlotsError
            There are not that many idle slots; nothing was changed.
        """
        slots = self._state.slots
        if count > len(slots.idle):
            raise OutOfSlotsError(
                f"{count} slots needed, {len(slots.idle)} of {slots.num_slots} are idle; free requests first or raise "
                "max_batch_size",
                requested=count,
                available=len(slots.idle),
            )
        return [self._activate(slots.best_fit(0, self._state.backing.mapped)) for _ in range(count)]

    def _activate(self, found: int | None) -> int:
        """Make an idle slot active, its work ordered after that of its last request. Lock held."""
        state = self._state
        fence = None if found is None else state.slots.fence(found)
        if fence is not None:
            state.pool.driver.order_after(fence)
        slot = state.slots.activate(found)
        state.eager.pop(slot, None)
        state.counters.pages_reused += state.backing.mapped(slot) * state.layout.num_planes
        state.note_mapped(slot)
        state.clean_pages[slot] = 0
        if state.zeroing == slot:
            state.zeroing = None
        return slot

    def undo_begin(self, *slots: int) -> None:
        """Make active slots idle again whose requests never began, behind the fences they had; lost ones stay lost."""
        with self._state.gate.lock:
            for slot in filter(self._state.slots.is_active, slots):
                self._state.slots.deactivate(slot)
                self._state.lengths.reset(slot)

    def want(self, slot: int, seq_len: int) -> None:
        """Ask for `seq_len` tokens of an active slot to be mapped ahead of need."""
        state = self._state
        with state.gate.lock:
            state.require_running()
            state.slots.require_active(slot)
            state.wanted[slot] = max(state.layout.pages_for(seq_len), state.wanted.get(slot, 0))
            self._mapper.wake()

    def end(self, slot: int) -> None:
        """Make an active slot idle behind the work queued so far; its pages stay. A pause under way is waited for."""
        state = self._state
        with state.gate.lock:
            if not state.paused:
                self._end(slot)
                return
        with state.work("free_reqid", paused=True), state.gate.lock:
            self._end(slot)

    def _end(self, slot: int) -> None:
        """Lock held, and the work token while the cache is paused."""
        self._state.slots.require_active(slot)
        self._leave(slot, self._state.fence_behind(slot))

    def leave(self, slot: int, fence: Fence) -> None:
        """*token* Make a leaving slot idle behind the copy of its rows."""
        with self._state.gate.lock:
            self._leave(slot, fence)

    def _leave(self, slot: int, fence: Fence) -> None:
        """Lock held. What of the request is in host memory, while the cache is paused, is given back."""
        state = self._state
        state.slots.release(slot, fence)
        state.lengths.reset(slot)
        state.wanted.pop(slot, None)
        state.drop_offloaded(slot)
        state.unscheduled = True
        self._mapper.wake()
