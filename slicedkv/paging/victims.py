"""What may be taken back when memory is short, in which order, and how much a cache can get in all.

A cache first gives its own: pages beyond requests' own ones (lookahead), eager pages, then idle slots. Of these the
largest goes first, and the slot that would be handed out next goes last. Then other caches of the pool give what they
hold beyond their `min_share`, idle slots before margin. `reclaim` takes it. Hold the gate's lock to call anything.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple, TypeAlias

from ..state.cache_state import CacheState

__all__ = [
    "Candidates",
    "available_pages",
    "candidates",
    "freeable_pages",
    "freed_pages",
    "has_room",
    "idle_victims",
    "next_slot",
    "unpromised_pages",
    "victims",
    "victims_beyond_share",
]


class Victim(NamedTuple):
    """A slot, the pages per plane that can be taken from it, and how many of these become free.

    `freed` holds if all victims before are taken, too. Shared pages become free with the last slot that has them.
    """

    slot: int
    pages: int
    freed: int


Candidates: TypeAlias = list[tuple[CacheState, list[Victim]]]


def next_slot(state: CacheState) -> int | None:
    """The slot best fit would hand out next for a request of unknown length."""
    return state.best_fit(0)


def victims(state: CacheState) -> list[Victim]:
    """Everything that may be taken back, first things first."""
    ranked = _ranked(state, state.slots.active | state.slots.idle, next_slot(state))
    reckoning = state.backing.shared.reckoning()
    return [Victim(slot, pages, reckoning.drop(slot, pages)[1]) for _, slot, pages in ranked]


def idle_victims(state: CacheState) -> list[int]:
    """Idle slots among `victims`, in their order, without the one that would be handed out next."""
    coming = next_slot(state)
    return [slot for _, slot, _ in _ranked(state, state.slots.idle, coming) if slot != coming]


def _ranked(state: CacheState, slots: Set[int], coming: int | None) -> list[tuple[tuple[int, int], int, int]]:
    """Rank, slot and spare pages per plane of the slots that can spare some; `coming` ranks last among idle ones."""
    ranked = []
    for slot in slots:
        idle_rank = 1 if slot in state.eager else 2 + (slot == coming)
        rank = 0 if state.slots.is_active(slot) else idle_rank
        if pages := state.spare_pages(slot):
            ranked.append(((rank, -pages), slot, pages))
    return sorted(ranked)


def victims_beyond_share(state: CacheState, *, own: bool = False) -> list[Victim]:
    """`victims`, as far as the cache keeps its share. Idle slots come first, unless the cache takes its `own`."""
    backing = state.backing
    beyond = max(0, backing.held_pages - backing.leaving_pages - state.min_share_pages) // state.layout.num_planes
    reckoning, found = backing.shared.reckoning(), []
    for slot, pages, _ in sorted(victims(state), key=lambda victim: not own and state.slots.is_active(victim.slot)):
        whole, freed = reckoning.drop(slot, pages, beyond)
        if whole:
            found.append(Victim(slot, whole, freed))
            beyond -= freed
    return found


def freed_pages(state: CacheState, found: list[Victim]) -> int:
    """Pages over all planes that become free."""
    return sum(victim.freed for victim in found) * state.layout.num_planes


def freeable_pages(state: CacheState, active: Set[int]) -> int:
    """Pages over all planes by which `available_pages` would grow if some active slots became idle."""

    def freed(ending: Set[int]) -> int:
        reckoning = state.backing.shared.reckoning()
        slots = state.slots.active | state.slots.idle
        pages = {slot: state.backing.mapped(slot) if slot in ending else state.spare_pages(slot) for slot in slots}
        return sum(reckoning.drop(slot, count)[1] for slot, count in pages.items())

    return (freed(active) - freed(frozenset())) * state.layout.num_planes


def candidates(state: CacheState) -> Candidates:
    """What one cache may take: its own, then that of the others on its pool."""
    others = state.neighbours
    for member in (state, *others):
        member.catch_up()
    return [(state, victims(state)), *((other, victims_beyond_share(other)) for other in others)]


def unpromised_pages(state: CacheState, creatable: int | None = None) -> int:
    """Pages over all planes that the pool can give without unmapping anything or breaking a promise to others.

    `creatable` replaces what the limit allows to create.
    """
    pool = state.pool
    unpromised = pool.free_pages - pool.shares.promised(besides=state)
    return unpromised + (pool.creatable_pages if creatable is None else creatable)


def available_pages(state: CacheState) -> int:
    """Pages over all planes that requests of a cache can get: unpromised ones, and all that may be taken back."""
    others = sum(freed_pages(other, victims_beyond_share(other)) for other in state.neighbours)
    return max(0, unpromised_pages(state) + _own_pages(state) + others)


def _own_pages(state: CacheState) -> int:
    """Pages over all planes in `victims`, found more quickly: an engine asks before every step."""
    if state.backing.shared.alias_pages:
        return freed_pages(state, victims(state))
    spare = sum(map(state.spare_pages, state.slots.active | state.slots.idle)) * state.layout.num_planes
    # Pages that the mapper is mapping count as missing for their request until they are there. So they count here.
    return spare + (0 if state.mapper_slots is None else state.pool.in_flight_pages)


def has_room(state: CacheState, pages: int) -> bool:
    """True when a slot is idle and `pages` pages per plane are available beside those that requests asked for.

    False while the cache is paused.
    """
    if state.paused or not (state.slots.idle or state.slots.ending):
        return False
    asked = sum(max(0, wanted - state.backing.mapped(slot)) for slot, wanted in state.wanted.items())
    needed = (pages + asked) * state.layout.num_planes
    return not needed or needed <= available_pages(state)
