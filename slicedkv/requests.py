"""`Requests`: giving slots to requests and taking them back, with all the books that belong to it.

Arguments are checked by the cache. Nothing here maps or unmaps; the mapper is told that there may be work.
"""

from __future__ import annotations

from .mapper import Mapper
from .planner import Planner
from .state import CacheState
from .vmm.base import Fence

__all__ = ["Requests"]


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

        With `told` the mapper maps them; otherwise the caller does, or calls `undo`.
        """
        state = self._state
        pages = state.layout.pages_for(seq_len)
        with state.gate.lock:
            state.require_running()
            found = state.slots.best_fit(max(1, pages), state.backing.mapped)
            fence = None if found is None else state.slots.fence(found)
            if fence is not None:
                state.pool.driver.order_after(fence)
            slot = state.slots.activate(found)
            state.eager.pop(slot, None)
            state.counters.pages_reused += state.backing.mapped(slot) * state.layout.num_planes
            state.note_mapped(slot)
            state.clean_pages[slot] = 0
            if seq_len and told:
                state.wanted[slot] = pages
                self._planner.note_prompt(seq_len)
            self._mapper.wake()
        return slot

    def want(self, slot: int, seq_len: int) -> None:
        """Ask for `seq_len` tokens of an active slot to be mapped ahead of need."""
        state = self._state
        with state.gate.lock:
            state.require_running()
            state.slots.require_active(slot)
            state.wanted[slot] = max(state.layout.pages_for(seq_len), state.wanted.get(slot, 0))
            self._mapper.wake()

    def undo(self, slot: int) -> None:
        """Make a slot idle that was activated for nothing; work of the request before may still run."""
        with self._state.gate.lock:
            self._state.slots.deactivate(slot)
            self._state.lengths.reset(slot)

    def end(self, slot: int) -> None:
        """Make an active slot idle behind the work queued so far; its pages stay."""
        state = self._state
        with state.gate.lock:
            state.require_running()
            state.slots.require_active(slot)
            self._leave(slot, state.pool.driver.record_fence())

    def leave(self, slot: int, fence: Fence) -> None:
        """*token* Make a leaving slot idle behind the copy of its rows."""
        with self._state.gate.lock:
            self._leave(slot, fence)

    def _leave(self, slot: int, fence: Fence) -> None:
        state = self._state
        state.slots.release(slot, fence)
        state.lengths.reset(slot)
        state.wanted.pop(slot, None)
        state.unscheduled = True
        self._mapper.wake()
