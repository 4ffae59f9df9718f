"""`Holds`: the slots that the call under way reads or writes while it does not have the lock.

A call that lets go of the lock between deciding and acting holds the work token meanwhile, so there is one such call at
a time. The slots that it decided about stand here. Who steps, shares or moves the request of a held slot waits for the
token; who ends it puts the end off until the call is over. Calls that take no token look here first.

Slots are numbers here. Hold the gate's lock to read or change anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..memory.gate import Claim, Gate

__all__ = ["Holds"]


class Holds:
    """What one cache's call with the work token holds.

    Parameters
    ----------
    gate : Gate

    Attributes
    ----------
    claims : dict of int to int
        By slot, the pages per plane that the call needs, also beyond those of the slot's request.
    emptied : set of int
        Slots that the call empties: what was asked for ahead there does not keep pages.
    leaving : set of int
        Slots whose request the call itself ends.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._claim: Claim | None = None
        self._slots: set[int] = set()
        self._lens: torch.Tensor | None = None
        self.claims: dict[int, int] = {}
        self.emptied: set[int] = set()
        self.leaving: set[int] = set()

    @property
    def _is_live(self) -> bool:
        """False when nothing is held, also after a call that was interrupted before it let go: its token is gone."""
        return self._claim is not None and self._gate.claim is self._claim

    def has(self, slot: int) -> bool:
        """True when a slot is held."""
        return self._is_live and (slot in self._slots or (self._lens is not None and bool(self._lens[slot] > 0)))

    def meet(self, lens: torch.Tensor) -> bool:
        """True when a slot with a length above 0 in `lens`, ``[B]`` int64, is held."""
        if not self._is_live:
            return False
        if any(lens[slot] > 0 for slot in self._slots):
            return True
        return self._lens is not None and bool(((self._lens > 0) & (lens > 0)).any())

    def add(self, slots: Iterable[int]) -> None:
        """*token* Hold these slots, too, until `clear`."""
        self._claim = self._gate.claim
        self._slots.update(slots)

    def add_all(self, lens: torch.Tensor) -> None:
        """*token* Hold every slot with a length above 0 in `lens`, as a vector: they may be thousands."""
        self._claim = self._gate.claim
        self._lens = lens.clone()

    def clear(self) -> None:
        """Let go of everything."""
        self._claim = None
        self._slots.clear()
        self._lens = None
        self.claims.clear()
        self.emptied.clear()
        self.leaving.clear()
