"""`Lifetime`: a request gets a slot, is cut short, and ends; with all the books that belong to it.

The cache checks arguments before it calls. Nothing is mapped here. A new request gives up what it must not keep of its
slot: pages that other slots share, and the part of an extent that nobody could use. The mapper does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from ..errors import OutOfSlotsError, StateError
from ..paging.mapper import Mapper
from ..paging.planner import Planner
from ..paging.reclaim import reclaim_slot
from ..state.cache_state import CacheState

__all__ = ["Lifetime"]


class Lifetime:
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

    # --- the beginning ----------------------------------------------------------------------------------------------

    def begin(self, seq_len: int, *, map_ahead: bool = True) -> int:
        """Activate the slot that suits `seq_len` tokens best; see `SlicedKVCache.alloc_reqid`.

        With `map_ahead` the mapper maps them. Without, the caller holds the work token; it maps them, or it calls
        `undo_begin`.
        """
        state = self._state
        pages = state.layout.pages_for(seq_len)
        while True:
            with state.gate.lock:
                state.require_running()
                slot = state.best_fit(pages)
                if slot is None:
                    blocked, keep = map_ahead and bool(state.slots.ending), None
                else:
                    blocked, keep = bool(pages) and state.is_growing(slot), self._kept(slot, pages)
                if not blocked and keep is None:
                    return self._begin(slot, seq_len, map_ahead=map_ahead)
            with state.work("alloc_reqid") if map_ahead else nullcontext():
                if slot is not None and keep is not None and not blocked:
                    reclaim_slot(state, slot, wait=True, keep_pages=keep)

    def _begin(self, found: int | None, seq_len: int, *, map_ahead: bool) -> int:
        """Lock held."""
        slot = self._activate(found)
        if seq_len and map_ahead:
            self._state.wanted[slot] = self._state.layout.pages_for(seq_len)
            self._planner.note_prompt(seq_len)
        self._mapper.wake()
        return slot

    def _kept(self, slot: int, pages: int) -> int | None:
        """Pages per plane that a new request keeps of an idle slot, where others must go first; None if none must.

        Shared pages must go. Stranded ones must if nothing has to be waited for. Lock held.
        """
        state = self._state
        if state.backing.shared.has(slot):
            return 0
        usable = state.usable_pages(slot, pages)
        return usable if usable < state.backing.mapped(slot) and state.is_over(slot) else None

    def begin_empty(self, count: int) -> list[int]:
        """Activate the `count` slots that have the least mapped. Lock held.

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
        """Make slots idle again whose requests never began, behind the fences they had; lost ones stay lost."""
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

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, slot: int) -> None:
        """End a request behind the work queued so far; its pages stay.

        Waits for a pause under way, and for another thread's call that may end the request itself. In the middle of a
        call of this thread, such as in a finalizer, the end is put off.
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
        self._after_others("free_reqid", slot, lambda: self._end(slot), paused=True)

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
        self._after_others("truncate", slot, lambda: self._truncate(slot, seq_len))

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

    def _after_others(self, purpose: str, slot: int, act: Callable[[], None], *, paused: bool = False) -> None:
        """Wait until no other call uses the request, then act on it, unless it ended meanwhile."""
        with self._state.work(purpose, slot, paused=paused) as tickets, self._state.gate.lock:
            self._state.slots.require_same(tickets)
            act()
