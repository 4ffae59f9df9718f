"""What may be taken back when memory is short, in which order, and taking it back.

The margin comes first: pages beyond a request's own (lookahead), then eager pages, then idle slots, the largest first
and the slot that would be handed out next last. Then comes what other caches of the same pool hold beyond their
`min_share`, idle slots before margin. Nothing is unmapped before the work that may use it is done on the device.
Functions marked *token* are called by whoever holds the gate's work token, which all caches of a pool share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .errors import OutOfPagesError, StateError
from .state import CacheState

__all__ = [
    "available_pages",
    "claim_share",
    "has_room",
    "next_slot",
    "reclaim_slot",
    "set_memory_limit",
    "take_back",
    "takeable",
    "trim",
    "trim_slots",
    "victims",
]

_FENCE_TIMEOUT_S = 4.0


class Victim(NamedTuple):
    """A slot and the pages per plane that can be taken from it."""

    slot: int
    pages: int


def next_slot(state: CacheState) -> int | None:
    """The slot best fit would hand out next for a short request. Lock held."""
    return state.slots.best_fit(1, state.backing.mapped)


def victims(state: CacheState) -> list[Victim]:
    """Everything that may be taken back, first things first. Lock held."""
    coming = next_slot(state)
    ranked: list[tuple[tuple[int, int], Victim]] = []
    for slot in state.slots.active | state.slots.idle:
        idle_rank = 1 if slot in state.eager else 2 + (slot == coming)
        rank = 0 if state.slots.is_active(slot) else idle_rank
        if pages := state.spare_pages(slot):
            ranked.append(((rank, -pages), Victim(slot, pages)))
    return [victim for _, victim in sorted(ranked)]


def takeable(state: CacheState) -> list[Victim]:
    """What other caches may take from this one: `victims`, idle slots first, down to its share. Lock held."""
    return _beyond_share(state, sorted(victims(state), key=lambda victim: state.slots.is_active(victim.slot)))


def _beyond_share(state: CacheState, candidates: list[Victim]) -> list[Victim]:
    """As much of `candidates`, in their order, as leaves a cache its share."""
    beyond = (state.backing.mapped_pages - state.min_share_pages) // state.layout.num_planes
    found = []
    for slot, pages in candidates:
        whole = state.backing.shrinkable(slot, state.backing.mapped(slot) - min(pages, max(0, beyond)))
        if whole:
            found.append(Victim(slot, whole))
            beyond -= whole
    return found


def _pages(state: CacheState, found: list[Victim]) -> int:
    """Pages over all planes."""
    return sum(victim.pages for victim in found) * state.layout.num_planes


def available_pages(state: CacheState) -> int:
    """Pages over all planes that can be had: free, creatable, and whatever may be taken back. Lock held."""
    shares = state.pool.shares
    others = sum(_pages(other, takeable(other)) for other in shares.others(state))
    unpromised = state.pool.available_pages - shares.promised(besides=state)
    return max(0, unpromised + _pages(state, victims(state)) + others)


def has_room(state: CacheState, pages: int) -> bool:
    """True when a slot is idle and `pages` more pages per plane can be had beside what requests were promised.

    Never while the cache is paused.
    """
    with state.gate.lock:
        promised = sum(max(0, wanted - state.backing.mapped(slot)) for slot, wanted in state.wanted.items())
        room = available_pages(state) - promised * state.layout.num_planes
        return not state.paused and bool(state.slots.idle) and pages * state.layout.num_planes <= room


def take_back(state: CacheState, need_pages: int, *, creatable: int | None = None) -> None:
    """*token* Unmap margin and idle pages until `need_pages` pages can be had from the pool.

    Waits, for a bounded time, for device work that may still use them.

    Parameters
    ----------
    need_pages : int
        Over all planes.
    creatable : int, optional
        Pages that can still be created; by default as many as the memory limit allows.

    Raises
    ------
    OutOfPagesError
        There is not that much: nothing was unmapped, unless requests came and took it meanwhile.
    """
    pool = state.pool

    def obtainable() -> int:
        unpromised = pool.free_pages - pool.shares.promised(besides=state)
        return unpromised + (pool.creatable_pages if creatable is None else creatable)

    with state.gate.lock:
        if obtainable() >= need_pages:
            return
        candidates = [(state, victims(state))]
        candidates += [(other, takeable(other)) for other in pool.shares.others(state)]
        total = obtainable() + sum(_pages(owner, found) for owner, found in candidates)
    if total >= need_pages:
        _take(candidates, lambda: obtainable() >= need_pages)
        with state.gate.lock:
            total = obtainable()  # less than was found, when an idle slot went to a request meanwhile
    if total < need_pages:
        raise OutOfPagesError(
            f"{need_pages} pages of {pool.page_bytes} bytes needed, {max(0, total)} can be had; free a request or "
            f"raise the memory limit of {pool.memory_limit} bytes",
            requested=need_pages,
            available=max(0, total),
        )


def _take(candidates: list[tuple[CacheState, list[Victim]]], enough: Callable[[], bool]) -> None:
    """*token* Unmap what was found in caches, one slot after another, until there is enough."""
    for owner, found in candidates:
        for slot, pages in found:
            if enough():
                return
            reclaim_slot(owner, slot, wait=True, keep_pages=owner.backing.mapped(slot) - pages)


def reclaim_slot(state: CacheState, slot: int, *, wait: bool, keep_pages: int = 0) -> int:
    """*token* Unmap what a slot holds beyond its request's own pages; return the pages freed over all planes.

    Parameters
    ----------
    wait : bool
        Wait for device work that may still use the pages; otherwise leave them and return 0.
    keep_pages : int
        Pages per plane to leave in any case.

    Raises
    ------
    DriverError
        Nothing was unmapped.
    StateError
        The device work did not end in time, or the slot was lost (see `Backing.unmap`).
    """
    driver = state.pool.driver
    fence = state.slots.fence(slot)
    if wait and fence is not None and not driver.wait_fence(fence, _FENCE_TIMEOUT_S):
        raise StateError(f"waited {_FENCE_TIMEOUT_S:g} s for device work on freed reqid {slot}; its pages stay mapped")
    with state.gate.lock:
        # The slot may have been handed out, and even freed again, since it was chosen: look again.
        fence = state.slots.fence(slot)
        if fence is not None and not driver.fence_done(fence):
            return 0
        state.slots.clear_fences((slot,))
        cut = state.strike(slot, keep_pages)
    if cut is None:
        return 0
    try:
        freed = state.backing.unmap(cut)
    except Exception as error:
        with state.gate.lock:
            if isinstance(error, StateError):
                state.lose(slot)
            state.note_mapped(slot)
        raise
    with state.gate.lock:
        state.counters.pages_reclaimed += (cut.end_page - cut.first_page) * state.layout.num_planes
    return freed


def trim_slots(state: CacheState) -> None:
    """*token* Unmap everything that may be taken back. Waits, for a bounded time, for device work on it."""
    with state.gate.lock:
        candidates = victims(state)
    for victim in candidates:
        reclaim_slot(state, victim.slot, wait=True)


def trim(state: CacheState) -> int:
    """*token* Give back whatever may be taken back, free pages and unused host memory; return the pages released."""
    trim_slots(state)
    state.host.trim()
    return state.pool.trim()


def set_memory_limit(state: CacheState, num_bytes: int) -> None:
    """*token* Change the pool's limit, taking back what may be taken when less is left. Waits as `take_back` does.

    Raises
    ------
    ConfigError, OutOfPagesError
        The limit holds no page, less than the caches of the pool are promised, or less than requests need; it stays as
        it was.
    """
    pool = state.pool
    limit = pool.pages_in_limit(num_bytes)

    def excess() -> int:
        return pool.created_pages - pool.free_pages + pool.shares.promised() - limit

    with state.gate.lock:
        pool.shares.check_limit(limit)
        candidates = [(state, _beyond_share(state, victims(state)))]
        candidates += [(other, takeable(other)) for other in pool.shares.others(state)]
        needed = limit + excess() - sum(_pages(owner, found) for owner, found in candidates)
    if needed <= limit:
        _take(candidates, lambda: excess() <= 0)
        with state.gate.lock:
            needed = limit + excess()  # more than was found, when an idle slot went to a request meanwhile
    if needed > limit:
        raise OutOfPagesError(
            f"memory_limit of {num_bytes} bytes holds {limit} pages of {pool.page_bytes} bytes, but requests need "
            f"{needed}; free a request first",
            requested=needed,
            available=limit,
        )
    pool.set_memory_limit(num_bytes)


def claim_share(state: CacheState) -> None:
    """*token* Count a new cache in and set its share of the pool aside, taking from others what they do not need.

    Raises
    ------
    ConfigError, OutOfPagesError
        The limit does not hold all shares; requests of other caches have the memory. Nothing was changed.
    """
    pool = state.pool
    with state.gate.lock:
        pool.shares.check_limit(pool.memory_limit // pool.page_bytes, state.min_share_pages)
    take_back(state, state.min_share_pages)
    with state.gate.lock:
        pool.shares.join(state)
