"""Taking back what may be taken when memory is short, see `victims`, and moving the limit.

Nothing is unmapped before the device is done with the work that may use it. Functions marked *token* need the gate's
work token, which all caches of a pool share.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import OutOfPagesError, StateError
from ..memory.patience import TIMEOUT_S
from ..state.cache_state import CacheState
from ..state.protection import changing
from ..vmm.base import Fence
from .victims import Candidates, candidates, freed_pages, unpromised_pages, victims, victims_beyond_share

__all__ = [
    "claim_share",
    "reclaim_slot",
    "require_room",
    "set_memory_limit",
    "take_back",
    "trim",
    "trim_slots",
    "wait_for",
    "wait_for_slot",
]


def require_room(state: CacheState, need_pages: int, creatable: int | None = None) -> Candidates:
    """*token* Return what may be taken back, or refuse a need, in pages over all planes, that exceeds all of it.

    Raises
    ------
    OutOfPagesError
        See `take_back`.
    """
    with state.gate.lock:
        found = candidates(state)
        total = unpromised_pages(state, creatable) + sum(freed_pages(*of_one) for of_one in found)
    _refuse_beyond(state, need_pages, total)
    return found


def _refuse_beyond(state: CacheState, need_pages: int, total: int) -> None:
    if total < need_pages:
        pool, total = state.pool, max(0, total)
        raise OutOfPagesError(
            f"{need_pages} pages of {pool.page_bytes} bytes needed, {total} can be had; free a request or "
            f"raise the memory limit of {pool.memory_limit} bytes",
            requested=need_pages,
            available=total,
        )


def take_back(state: CacheState, need_pages: int, *, creatable: int | None = None) -> None:
    """*token* Unmap margin and idle pages until the pool can give `need_pages` pages.

    It waits, for at most 4 s each, for device work that may still use them.

    Parameters
    ----------
    need_pages : int
        Over all planes.
    creatable : int, optional
        Pages that can still be created; by default as many as the memory limit allows.

    Raises
    ------
    OutOfPagesError
        There are fewer. Nothing was unmapped, unless new requests took idle slots meanwhile.
    """

    def unpromised() -> int:
        with state.gate.lock:
            return unpromised_pages(state, creatable)

    if unpromised() < need_pages:
        _take(require_room(state, need_pages, creatable), lambda: unpromised() >= need_pages)
        # Less than was found, when an idle slot went to a request meanwhile.
        _refuse_beyond(state, need_pages, unpromised())


def _take(found: Candidates, enough: Callable[[], bool]) -> None:
    """*token* Unmap what was found in caches, one slot after another, until there is enough."""
    for owner, victims_of_owner in found:
        for slot, pages, _ in victims_of_owner:
            if enough():
                return
            reclaim_slot(owner, slot, wait=True, keep_pages=owner.backing.mapped(slot) - pages)


def reclaim_slot(state: CacheState, slot: int, *, wait: bool, keep_pages: int = 0) -> int:
    """*token* Unmap what a slot holds beyond its request's own pages; return the pages freed over all planes.

    Parameters
    ----------
    wait : bool
        Wait for device work that may still use the pages. Without it, leave such pages alone and return 0.
    keep_pages : int
        Pages per plane to leave in any case.

    Raises
    ------
    DriverError
        Nothing was unmapped.
    StateError
        The device work did not end in time; or the slot was lost, see `Backing.unmap`.
    """
    driver = state.pool.driver
    if wait:
        wait_for_slot(state, slot)
    with state.gate.lock:
        # Since it was chosen, the slot may have gone to a request, which may even have freed it: look again.
        fence = state.slots.fence(slot)
        if fence is not None and not driver.fence_done(fence):
            return 0
        state.slots.clear_fences((slot,))
        cut = state.strike(slot, keep_pages)
    if cut is None:
        return 0
    with changing(state.protector, cut):
        try:
            freed = state.backing.unmap(cut)
        except BaseException as error:
            with state.gate.lock:
                if isinstance(error, StateError):
                    state.lose(slot)
                state.note_mapped(slot)
            raise
    with state.gate.lock:
        state.counters.pages_reclaimed += (cut.end_page - cut.first_page) * state.layout.num_planes
    return freed


def wait_for_slot(state: CacheState, slot: int) -> None:
    """*token* Wait for the device work that the slot's fence stands for; `StateError` if it does not end in time."""
    fence = state.slots.fence(slot)
    if fence is not None:
        wait_for(state, fence, f"device work on {'' if state.slots.is_active(slot) else 'freed '}reqid {slot}")


def wait_for(state: CacheState, fence: Fence, what: str) -> None:
    """*token* Wait for a fence, for a bounded time; `what` appears in the `StateError` when it is not done by then."""
    if not state.pool.driver.wait_fence(fence, TIMEOUT_S):
        raise StateError(f"waited {TIMEOUT_S:g} s for {what}; its pages stay mapped")


def trim_slots(state: CacheState) -> None:
    """*token* Unmap all that may be taken back. It waits, for at most 4 s each, for device work on it."""
    with state.gate.lock:
        found = victims(state)
    for victim in found:
        reclaim_slot(state, victim.slot, wait=True)


def trim(state: CacheState) -> int:
    """*token* Give back all that may be taken back, free pages and unused host memory; return the pages released."""
    trim_slots(state)
    state.host.trim()
    return state.pool.trim()


def set_memory_limit(state: CacheState, num_bytes: int) -> None:
    """*token* Change the pool's limit. A lower one first takes back what it must, and waits as `take_back` does.

    Raises
    ------
    ConfigError, OutOfPagesError
        The limit holds no page, or less than was promised to caches, or less than requests need. It stays as it was.
    """
    pool = state.pool
    limit = pool.pages_in_limit(num_bytes)

    def in_use() -> int:
        """Pages that are mapped or promised. Lock held."""
        return pool.created_pages - pool.free_pages + pool.shares.promised()

    def enough() -> bool:
        with state.gate.lock:
            return in_use() <= limit

    with state.gate.lock:
        pool.shares.check_limit(limit)
        of_others = [(other, victims_beyond_share(other)) for other in state.neighbours]
        found = [(state, victims_beyond_share(state, own=True)), *of_others]
        needed = in_use() - sum(freed_pages(*of_one) for of_one in found)
    if needed <= limit:
        _take(found, enough)
        with state.gate.lock:
            needed = in_use()  # more than was found, when an idle slot went to a request meanwhile
    if needed > limit:
        raise OutOfPagesError(
            f"memory_limit of {num_bytes} bytes holds {limit} pages of {pool.page_bytes} bytes, but requests need "
            f"{needed}; free a request first",
            requested=needed,
            available=limit,
        )
    pool.set_memory_limit(num_bytes)


def claim_share(state: CacheState) -> None:
    """*token* Count a new cache in and set its share aside. For that it takes what other caches do not need.

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
