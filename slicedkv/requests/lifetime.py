"""`Requests`: giving slots to requests and taking them back, with all the books that belong to it.

Arguments are checked by the cache. Nothing here maps, and only what a new request must not keep of its slot's pages is
unmapped: those that other slots share, and the part of an extent that would be stranded. The mapper is told that there
may be work.
"""

from __future__ import annotations

from contextlib import nullcontext

from ..errors import OutOfSlotsError, StateError
from ..paging.mapper import Mapper
from ..paging.planner import Planner
from ..paging.reclaim import reclaim_slot
from ..state.cache_state import CacheState

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
                keep = self._keep(found, pages, told=told)
                if keep is None:
                    slot = self._activate(found)
                    if seq_len and told:
                        state.wanted[slot] = pages
                        self._planner.note_prompt(seq_len)
                    self._mapper.wake()
                    return slot
            with state.work("alloc_reqid") if told else nullcontext():
                if found is not None and keep != _LOOK_AGAIN:
                    reclaim_slot(state, found, wait=True, keep_pages=keep)

    def _keep(self, slot: int | None, pages: int, *, told: bool) -> int | None:
        """Pages per plane of an idle slot to keep when more must go before it is handed out; None if nothing must.

        What it shares must go; what would be stranded must if nothing has to be waited for. `_LOOK_AGAIN` says to wait
        for the work token and choose anew: the mapper is mapping pages for the slot, or there is no idle slot before
        another thread's call lets go of one whose request is over. Lock held.
        """
        state = self._state
        if slot is None:
            return _LOOK_AGAIN if told and state.slots.ending else None
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
        return slot

    def undo_begin(self, *slots: int) -> None:
        """Make active slots idle again whose requests never began, behind the fences they had; lost ones stay lost."""
        with self._state.gate.lock:
            for slot in filter(self._state.slots.is_active, slots):
                self._state.end(slot, None)

    def want(self, slot: int, seq_len: int) -> None:
        """Ask for `seq_len` tokens of an active slot to be mapped ahead of need."""
        state = self._state
        with state.gate.lock:
            state.require_running()
            state.slots.require_active(slot)
            state.wanted[slot] = max(state.layout.pages_for(seq_len), state.wanted.get(slot, 0))
            self._mapper.wake()

    def end(self, slot: int) -> None:
        """End a request behind the work queued so far; its pages stay.

        Waits for a pause under way, and for another thread's call that may end the request itself. In the middle of a
        call of this thread, such as in a finalizer, it is put off.
        """
        state = self._state
        if state.gate.is_inside():
            state.end_later(slot)
            return
        with state.gate.lock:
            state.slots.require_active(slot)
            if not state.paused and slot not in state.holds.leaving:
                self._end(slot)
                return
            if state.gate.is_working():
                state.end_later(slot)
                return
        with state.work("free_reqid", slot, paused=True) as tickets, state.gate.lock:
            state.slots.require_same(tickets)
            self._end(slot)

    def _end(self, slot: int) -> None:
        """Lock held, and the work token while the cache is paused."""
        self._state.end_or_put_off(slot, self._state.fence_behind(slot))
        self._mapper.wake()

    def truncate(self, slot: int, seq_len: int) -> None:
        """Cut a request short; see `SlicedKVCache.truncate`. Waits for a call of another thread that uses it."""
        state = self._state
        with state.gate.lock:
            state.require_running()
            state.slots.require_active(slot)
            if not state.holds.has(slot):
                self._truncate(slot, seq_len)
                return
        with state.work("truncate", slot) as tickets, state.gate.lock:
            state.slots.require_same(tickets)
            self._truncate(slot, seq_len)

    def _truncate(self, slot: int, seq_len: int) -> None:
        """Lock held, and the work token where another call held the slot."""
        state = self._state
        has = state.lengths.last(slot)
        if seq_len > has:
            raise StateError(f"reqid {slot} has {has} tokens, seq_len is {seq_len}; step makes a request longer")
        state.slots.set_fence(slot, state.fence_behind(slot))
        state.lengths.truncate(slot, seq_len)
        state.wanted.pop(slot, None)
        state.surplus.add(slot)
        state.unscheduled = True
        self._mapper.wake()
