"""`SlotTable`: which slots are active and which idle, and which idle slot a new request should get.

Pure bookkeeping without torch. It knows pages as counts that callers tell it. Not thread-safe: the cache calls it with
its gate's lock held.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping

from ..errors import OutOfSlotsError, StateError
from ..vmm.base import Fence

__all__ = ["SlotTable"]


class SlotTable:
    """States of `num_slots` slots.

    A slot is active (a request has it), idle (free, perhaps still backed by pages) or lost (the driver failed and
    nobody knows what is mapped; it is never handed out again). An active slot may be ending: its request is over, but
    a call under way still reads or writes its pages.

    Attributes
    ----------
    requests : array of int
        For each slot, how many requests it has had so far; negated while no request has it. So a number above 0 that
        did not change stands for the same request.
    reads : dict of int to Fence
        By active slot, the copy that may still read its rows, perhaps on another stream than its request's.
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
        """True when the slot's pages are in use: by a request, or by a call whose request is ending."""
        return slot in self._active

    def has_request(self, reqid: int) -> bool:
        """True when a request has the slot and is not ending."""
        return 0 <= reqid < self.num_slots and self.requests[reqid] > 0

    def require_active(self, reqid: int) -> None:
        """Raise `StateError` unless `reqid` names a request."""
        if self.has_request(reqid):
            return
        if not 0 <= reqid < self.num_slots:
            raise StateError(f"reqid {reqid} does not exist; this cache has reqids [0, {self.num_slots})")
        raise StateError(f"reqid {reqid} is not active; it was freed already or never allocated")

    def generation(self, slot: int) -> int:
        """How many requests the slot has had. While a request has it, the number stands for that request."""
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
        """Return the idle slot that suits a request of `pages` pages per plane best, or None when there is none.

        Of the slots with enough usable pages, that is the one with the fewest; if none has enough, the one with the
        most. Among equals, fewer `mapped` pages go first, then a slot without a fence, then the lowest number.
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
        """End a request whose pages a call still uses. `fence` marks the end of the request's own work."""
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
        """The fence of device work that may still use the slot's pages, or None."""
        return self._fences.get(slot)

    def set_fence(self, slot: int, fence: Fence) -> None:
        """Note device work on a slot's pages. `fence` comes after the fence that the slot has, if it has one."""
        self._fences[slot] = fence

    def clear_fences(self, slots: Iterable[int]) -> None:
        """Forget the fences of `slots`: they are done."""
        for slot in slots:
            self._fences.pop(slot, None)
