"""`zero_on_reuse`: pages are zeroed before a request may see them, ordered on the caller's stream.

Pages come from a slot's last request or from other slots, so every page is dirty when it comes to a request. Zeroing is
queued on the stream that is current in `step`, before anything the caller launches there afterwards, and a fence is
left behind so that no page is unmapped under it. Pages mapped ahead are zeroed by the first `step` that finds them.
"""

from __future__ import annotations

from .state import CacheState
from .views import KVViews

__all__ = ["Zeroer"]


class Zeroer:
    """Zero what active requests have mapped and not seen yet.

    Parameters
    ----------
    state : CacheState
    views : KVViews
    """

    def __init__(self, state: CacheState, views: KVViews) -> None:
        self._state = state
        self._views = views
        self._clean = [0] * state.layout.max_batch_size

    def forget(self, slot: int) -> None:
        """Call everything behind `slot` dirty: it has a new request. Lock held."""
        self._clean[slot] = 0

    def run(self) -> None:
        """Queue zeroing of all dirty pages of active slots on the current stream. Takes the work token.

        The token keeps the mapper from unmapping margin pages while they are being zeroed.
        """
        state = self._state
        with state.gate.work("zero_on_reuse"):
            with state.gate.lock:
                dirty = [(slot, state.backing.mapped(slot)) for slot in state.slots.active]
            for slot, mapped in dirty:
                first, self._clean[slot] = min(self._clean[slot], mapped), mapped
                if first == mapped:
                    continue
                for pages in self._views.page_bytes_of(state.layout, slot, first, mapped):
                    pages.zero_()
                with state.gate.lock:
                    state.slots.set_fence(slot, state.pool.driver.record_fence())

    def is_needed(self) -> bool:
        """True when an active slot has pages that were not zeroed. Lock held."""
        return any(self._clean[slot] != self._state.backing.mapped(slot) for slot in self._state.slots.active)
