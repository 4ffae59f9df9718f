"""`SlotTable`: which slots are active and which idle, and which idle slot a new request should get.

Pure Python bookkeeping; knows neither torch, drivers nor pages beyond the counts it is told. Not thread-safe: the
cache calls it with its gate's lock held.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping

from ..errors import OutOfSlotsError, StateError
from ..vmm.base import Fence

__all__ = ["SlotTable"]


class SlotTable:
    """States of `num_slots` slots.

    A slot is active (a request has it), idle (free, perhaps still backed by pages) or lost (a driver failure left its
    mapping in an unknown state; it is never handed out again). An active slot may be ending: its request is over for
    everybody but the call that still reads or writes its pages.

    Attributes
    ----------
    requests : array of int
        Of each slot, how many requests it has had, counting the one it has; less than 1, the same number negated, when
        nobody has it. So a number above 0 that is the same as before stands for the same request.
    reads : dict of int to Fence
        Copies that may still read an active slot's rows, perhaps on another stream than its request's.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reads: dict[int, Fence] = {}
        self._active: set[int] = set()
        self._idle: set[int] = set(range(num_slots))
        self._ending: set[int] = set()
        self.requests = array("q", bytes(8 * num_slots))
        self._fences: dict[int, Fence] = {}

    @property
    def active(self) -> frozenset[int]:
        """Slots that hold a request."""
        return frozenset(self._active)

    @property
    def idle(self) -> frozenset[int]:
        """Slots that a new request may get."""
        return frozenset(self._idle)

    @property
    def lost(self) -> frozenset[int]:
        """Slots out of use."""
        return frozenset(range(self.num_slots)) - self._active - self._idle

    @property
    def ending(self) -> frozenset[int]:
        """Active slots whose request is over as soon as the call that uses them is done."""
        return frozenset(self._ending)

    @property
    def num_active(self) -> int:
        """Number of slots that hold a request."""
        return len(self._active)

    def is_active(self, slot: int) -> bool:
        """True when `slot` holds a request, also one that is ending: its pages are in use."""
        return slot in self._active

    def has_request(self, reqid: int) -> bool:
        """True when a request has the slot and was not ended."""
        return 0 <= reqid < self.num_slots and self.requests[reqid] > 0

    def require_active(self, reqid: int) -> None:
        """Raise `StateError` unless `reqid` names a request."""
        if self.has_request(reqid):
            return
        if not 0 <= reqid < self.num_slots:
            raise StateError(f"reqid {reqid} does not exist; this cache has reqids [0, {self.num_slots})")
        raise StateError(f"reqid {reqid} is not active; it was freed already or never allocated")

    def generation(self, slot: int) -> int:
        """How many requests the slot has had: the same number means the same request, while it is active."""
        return abs(self.requests[slot])

    def tickets(self, reqids: Iterable[int]) -> dict[int, int]:
        """The generation of each of these requests, for `require_same`; `StateError` when one is not active."""
        found = {}
        for reqid in reqids:
            self.require_active(reqid)
            found[reqid] = self.requests[reqid]
        return found

    def require_same(self, tickets: Mapping[int, int]) -> None:
        """Raise `StateError` unless each request is still the one that its ticket was taken for."""
        for reqid, generation in tickets.items():
            self.require_active(reqid)
            if self.requests[reqid] != generation:
                raise StateError(
                    f"reqid {reqid} is not active; it was freed while this call waited, and its slot is another "
                    "request's now"
                )

    def best_fit(
        self, pages: int, usable: Callable[[int], int], mapped: Callable[[int], int] | None = None
    ) -> int | None:
        """Return the idle slot that suits a request of `pages` pages per plane, or None when all are active.

        That is the one with the fewest usable pages that suffice, else the one with the most; among equals one with
        fewer `mapped`, one whose last request is surely over, then the lowest.
        """
        if not self._idle:
            return None

        def fit(slot: int) -> tuple[bool, int, int, bool, int]:
            have = usable(slot)
            short = have < pages
            return short, -have if short else have, mapped(slot) if mapped else 0, slot in self._fences, slot

        return min(self._idle, key=fit)

    def activate(self, slot: int | None) -> int:
        """Make an idle slot active and return it.

        Raises
        ------
        OutOfSlotsError
            `slot` is None: there was no idle slot.
        """
        if slot is None:
            lost = f", {len(self.lost)} out of use until the cache is closed" if self.lost else ""
            raise OutOfSlotsError(
                f"none of {self.num_slots} slots is idle: {self.num_active} active{lost}; free a request first or "
                "raise max_batch_size",
                requested=1,
                available=0,
            )
        self._idle.remove(slot)
        self._active.add(slot)
        self.requests[slot] = self.generation(slot) + 1
        return slot

    def deactivate(self, slot: int, fence: Fence | None = None) -> None:
        """Make an active slot idle, behind `fence`, which marks the end of the work that may still use it.

        Without one it is idle behind the fence it had.
        """
        self._end(slot)
        self._ending.discard(slot)
        self._active.remove(slot)
        self._idle.add(slot)
        if fence is not None:
            self._fences[slot] = fence

    def _end(self, slot: int) -> None:
        self.requests[slot] = -self.generation(slot)
        self.reads.pop(slot, None)

    def set_ending(self, slot: int, fence: Fence) -> None:
        """End a request whose pages a call still uses; `fence` marks the end of the work of the request itself."""
        self._end(slot)
        self._ending.add(slot)
        self._fences[slot] = fence

    def lose(self, slot: int) -> None:
        """Never hand out `slot` again."""
        self._end(slot)
        self._idle.discard(slot)
        self._active.discard(slot)
        self._ending.discard(slot)

    def fence(self, slot: int) -> Fence | None:
        """The fence that must be done before anything behind the slot's old request is unmapped, or None."""
        return self._fences.get(slot)

    def set_fence(self, slot: int, fence: Fence) -> None:
        """Note device work on a slot's pages that an earlier fence, if there is one, comes before."""
        self._fences[slot] = fence

    def clear_fences(self, slots: Iterable[int]) -> None:
        """Forget the fences of `slots`: they are done."""
        for slot in slots:
            self._fences.pop(slot, None)
