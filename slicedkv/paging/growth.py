"""Mapping more pages behind slots, and bringing books and counters in line.

Calls that need pages now use `grow_now`. The planner, which maps ahead of need, uses `grow_slots`. Both need the gate's
work token (*token*).
"""

from __future__ import annotations

from ..errors import LostSlotsError, OutOfPagesError
from ..memory.change import Change
from ..state.cache_state import CacheState
from ..state.protection import changing
from ..stats import Reason
from .reclaim import take_back

__all__ = ["grow_now", "grow_slots"]


def grow_slots(state: CacheState, change: Change, reason: Reason) -> None:
    """*token* Make a change and bring books and counters in line; see `Backing.grow`.

    Raises
    ------
    OutOfPagesError, DriverError
        Nothing changed.
    LostSlotsError
        What these slots have mapped is unknown; they are out of use.
    """
    with changing(state.protector, *(swap.cut for swap in change.swaps)):
        try:
            extents = state.backing.grow(change)
        except LostSlotsError as error:
            with state.gate.lock:
                for slot in error.slots:
                    state.lose(slot)
                for alias in change.aliases:  # its pages may be mapped in the lost slot too
                    state.note_shared(alias.source)
            raise
    with state.gate.lock:
        pages = 0
        for slot, added in change.growths:
            pages += added
            if reason == "eager" and not state.slots.is_active(slot):
                state.eager[slot] = state.eager.get(slot, 0) + added
            state.note_mapped(slot)
        for alias in change.aliases:  # also when what follows fails
            state.note_shared(alias.slot)
            state.note_shared(alias.source)
        counters, planes = state.counters, state.layout.num_planes
        counters.count_mapped(reason, pages * planes)
        counters.extents_mapped += extents
        counters.pages_shared += sum(alias.segments.pages for alias in change.aliases) * planes
        counters.pages_copied += sum(swap.pages for swap in change.swaps) * planes


def grow_now(state: CacheState, change: Change) -> None:
    """*token* Make a change that a call needs now. When memory is short, take margin and idle pages back for it.

    Margin that the call itself needs stays: it is in `state.holds.claims`.

    Raises
    ------
    OutOfPagesError
        That is not enough. No request lost a page of its own.
    DriverError
        The driver failed for another reason than memory.
    """
    need = change.pages * state.layout.num_planes
    take_back(state, need)
    try:
        grow_slots(state, change, "growth")
    except OutOfPagesError:
        # The device has less than the limit promises: count on what it says it has, and take back the rest.
        on_device = state.pool.driver.memory_info().free_bytes // state.pool.page_bytes
        take_back(state, need, creatable=min(on_device, state.pool.creatable_pages))
        grow_slots(state, change, "growth")
