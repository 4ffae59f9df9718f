"""`Copier`: copies of bytes from one slot to another, queued on the stream that is current in the calling thread.

A fence is left behind on both slots, so that nothing is unmapped under a copy. Knows tensors and addresses; what must
be copied, and that both sides are mapped, is the business of `sharing` and `writing`.
"""

from __future__ import annotations

from .state import CacheState
from .views import KVViews

__all__ = ["Copier"]


class Copier:
    """Copy between the slots of one cache. Call with the work token held.

    Parameters
    ----------
    state : CacheState
    views : KVViews
    """

    def __init__(self, state: CacheState, views: KVViews) -> None:
        self._state = state
        self._views = views

    def copy(self, source: int, target: int, first_byte: int, end_byte: int) -> None:
        """Queue a copy of bytes ``[first_byte, end_byte)`` of one slot to those of another, in every plane."""
        layout = self._state.layout
        written = self._views.bytes_of(layout, target, first_byte, end_byte)
        read = self._views.bytes_of(layout, source, first_byte, end_byte)
        for to_plane, from_plane in zip(written, read, strict=True):
            to_plane.copy_(from_plane)
        self._leave_fence(source)
        self._leave_fence(target)

    def zero(self, slot: int, first_byte: int, end_byte: int) -> None:
        """Queue zeroing of bytes ``[first_byte, end_byte)`` of a slot in every plane."""
        for plane in self._views.bytes_of(self._state.layout, slot, first_byte, end_byte):
            plane.zero_()
        self._leave_fence(slot)

    def _leave_fence(self, slot: int) -> None:
        with self._state.gate.lock:
            self._state.slots.set_fence(slot, self._state.fence_behind(slot))
