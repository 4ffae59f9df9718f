"""Mapping more pages behind slots and keeping books and counters in line, at once or ahead of need.

Both functions are called by whoever holds the gate's work token (*token*). Who calls them when is decided in `cache`
(for a step) and `planner` (ahead of need).
"""

from __future__ import annotations

from typing import Literal

from .backing import Growth
from .errors import OutOfPagesError
from .reclaim import take_back
from .state import CacheState

__all__ = ["Reason", "grow_now", "grow_slots"]

Reason = Literal["growth", "prefetch", "lookahead", "eager", "stock", "reclaim"]


def grow_slots(state: CacheState, growths: tuple[Growth, ...], reason: Reason) -> None:
    """*token* Map more pages behind slots and bring books and counters in line.

    Raises
    ------
    OutOfPagesError, DriverError
        Nothing changed.
    """
    extents = state.backing.grow(growths)
    with state.gate.lock:
        pages = 0
        for slot, added in growths:
            pages += added
            if reason == "eager" and not state.slots.is_active(slot):
                state.eager[slot] = state.eager.get(slot, 0) + added
            state.note_mapped(slot)
        counters, name = state.counters, f"pages_{reason}"
        setattr(counters, name, getattr(counters, name) + pages * state.layout.num_planes)
        counters.extents_mapped += extents


def grow_now(state: CacheState, growths: tuple[Growth, ...]) -> None:
    """*token* Map pages a step needs now, taking margin and idle pages back where memory is short.

    What the step needs of the margin is in `state.claims` and stays.

    Raises
    ------
    OutOfPagesError
        Not even then is there enough. No request lost a page of its own.
    DriverError
        The driver failed for another reason than memory.
    """
    need = sum(pages for _, pages in growths) * state.layout.num_planes
    take_back(state, need)
    try:
        grow_slots(state, growths, "growth")
    except OutOfPagesError:
        # The device holds less than the limit promises: count on what it says it has, and take back the rest.
        on_device = state.pool.driver.memory_info().free_bytes // state.pool.page_bytes
        take_back(state, need, creatable=min(on_device, state.pool.creatable_pages))
        grow_slots(state, growths, "growth")
