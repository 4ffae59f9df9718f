"""`Holds`: the slots that the call under way reads or writes while it does not have the lock.

A call that lets go of the lock between deciding and acting holds the work token for as long, so there is one such call
at a time; what it decided about stands here. Whoever would end, step, share or move the request of a held slot waits
for the token, or puts it off until the call is over. Calls that need neither look here first.

Knows slots by number only. Read and changed with the gate's lock held.
"""

from __future__ import annotations

from collections.abc import Iterable

from .gate import Claim, Gate

__all__ = ["Holds"]


class Holds:
    """What one cache's call with the work token holds.

    Parameters
    ----------
    gate : Gate

    Attributes
    ----------
    claims : dict of int to int
        Pages per plane that the call needs, by slot, beyond those of the slot's request.
    emptied : set of int
        Slots whose pages all go: what was asked for ahead there does not count.
    leaving : set of int
        Slots whose request the call ends.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._claim: Claim | None = None
        self._slots: set[int] = set()
        self.claims: dict[int, int] = {}
        self.emptied: set[int] = set()
        self.leaving: set[int] = set()

    @property
    def slots(self) -> set[int]:
        """Held slots. None when the call was interrupted and could not let go: the token it had is gone."""
        return self._slots if self._slots and self._gate.claim is self._claim else set()

    def add(self, slots: Iterable[int]) -> None:
        """Hold these slots, too, until `clear`. *token*"""
        self._claim = self._gate.claim
        self._slots.update(slots)

    def clear(self) -> None:
        """Let go of everything."""
        self._claim = None
        self._slots.clear()
        self.claims.clear()
        self.emptied.clear()
        self.leaving.clear()
