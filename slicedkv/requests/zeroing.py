"""`zero_on_reuse`: pages are zeroed before a request may see them, ordered on the caller's stream.

Every page is dirty when a request gets it: the slot's last request or another slot had it. `step` queues zeroing on its
current stream before it counts a token in a page, and so before anything that the caller launches there afterwards. A
fence keeps the page mapped meanwhile. The first step that reaches pages mapped ahead zeroes them.
"""

from __future__ import annotations

import torch

from ..state.cache_state import CacheState
from .copier import Copier

__all__ = ["Zeroer"]


class Zeroer:
    """Zero what active requests have mapped and not seen yet.

    Parameters
    ----------
    state : CacheState
    copier : Copier
    """

    def __init__(self, state: CacheState, copier: Copier) -> None:
        self._state = state
        self._copier = copier

    def is_needed(self, lens: torch.Tensor) -> bool:
        """True when a request in a step has a dirty page. Lock held.

        Parameters
        ----------
        lens : Tensor
            ``[B]`` int64 lengths of the step; 0 for a slot that is not in it.
        """
        return bool(self._dirty(lens))

    def zero(self, lens: torch.Tensor) -> None:
        """*token* Queue zeroing of all dirty pages of a step's requests, and hold these.

        Other requests' steps may be on other streams, so their pages are left alone.
        """
        with self._state.gate.lock:
            dirty = self._dirty(lens)
            self._state.holds.add(slot for slot, _, _ in dirty)
        for slot, first, end in dirty:
            self._zero(slot, first, end)

    def run(self, lens: torch.Tensor) -> None:
        """Zero what the calling thread mapped ahead after a step. Takes the work token.

        Parameters
        ----------
        lens : Tensor
            Lengths of the step.
        """
        with self._state.gate.lock:
            if not self._dirty(lens):
                return
        with self._state.work("zero_on_reuse"):
            self.zero(lens)

    def clean(self, slot: int) -> None:
        """*token* Queue zeroing of one slot's dirty pages on the current stream; it is held."""
        with self._state.gate.lock:
            first, end = self._state.clean_pages[slot], self._state.backing.mapped(slot)
        if first < end:
            self._zero(slot, first, end)

    def _zero(self, slot: int, first: int, end: int) -> None:
        page_bytes = self._state.layout.page_bytes
        self._copier.zero(slot, first * page_bytes, end * page_bytes)
        with self._state.gate.lock:
            self._state.clean_pages[slot] = end

    def _dirty(self, lens: torch.Tensor) -> list[tuple[int, int, int]]:
        """Slots and the pages ``[first, end)`` of each that a request could see something old in. Lock held."""
        state = self._state
        spans = ((slot, state.clean_pages[slot], state.backing.mapped(slot)) for slot in state.slots.active)
        return [(slot, first, end) for slot, first, end in spans if first < end and lens[slot] > 0]
