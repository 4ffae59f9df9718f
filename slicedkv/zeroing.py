"""`zero_on_reuse`: pages are zeroed before a request may see them, ordered on the caller's stream.

Pages come from a slot's last request or from other slots, so every page is dirty when it comes to a request. Zeroing is
queued on the stream that is current in the request's `step`, before anything the caller launches there afterwards, and
a fence is left behind so that no page is unmapped under it. Pages mapped ahead are zeroed by the first such `step`.
"""

from __future__ import annotations

import torch

from .copying import Copier
from .state import CacheState

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

    def run(self, lens: torch.Tensor) -> None:
        """Queue zeroing of all dirty pages of the requests in a step on the current stream.

        Not of others, whose steps may be on other streams. Holds the work token, so that the mapper does not unmap
        margin pages while they are being zeroed.

        Parameters
        ----------
        lens : Tensor
            ``[B]`` int64 lengths of the step; 0 for a slot that is not in it.
        """
        state = self._state
        with state.gate.lock:
            if not self._dirty(lens):
                return
        with state.work("zero_on_reuse"):
            with state.gate.lock:
                dirty = self._dirty(lens)
            for slot, first, end in dirty:
                self._zero(slot, first, end)

    def clean(self, slot: int) -> None:
        """*token* Queue zeroing of one slot's dirty pages on the current stream."""
        with self._state.gate.lock:
            first, end = self._state.clean_pages[slot], self._state.backing.mapped(slot)
        if first < end:
            self._zero(slot, first, end)

    def _zero(self, slot: int, first: int, end: int) -> None:
        state, page_bytes = self._state, self._state.layout.page_bytes
        with state.gate.lock:
            state.zeroing = slot
        self._copier.zero(slot, first * page_bytes, end * page_bytes)
        with state.gate.lock:
            if state.zeroing == slot:  # and not another request's meanwhile, behind whose last one nothing was zeroed
                state.clean_pages[slot] = end

    def _dirty(self, lens: torch.Tensor) -> list[tuple[int, int, int]]:
        """Slots and the pages ``[first, end)`` of each that a request could see something old in. Lock held."""
        state = self._state
        spans = ((slot, state.clean_pages[slot], state.backing.mapped(slot)) for slot in state.slots.active)
        return [(slot, first, end) for slot, first, end in spans if first < end and lens[slot] > 0]
