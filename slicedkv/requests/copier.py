"""`Copier`: copies bytes from one slot to another, and zeroes them, on the stream current in the calling thread.

It leaves a fence on every slot that it touches, so that nothing is unmapped under its work. Its callers (`sharing`,
`copy_on_write`, `zeroing`) decide what to copy or zero, and see to it that it is mapped.
"""

from __future__ import annotations

from ..state.cache_state import CacheState
from ..views import KVViews

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
        self._leave_fence(source, read=True)
        self._leave_fence(target)

    def zero(self, slot: int, first_byte: int, end_byte: int) -> None:
        """Queue zeroing of bytes ``[first_byte, end_byte)`` of a slot in every plane."""
        for plane in self._views.bytes_of(self._state.layout, slot, first_byte, end_byte):
            plane.zero_()
        self._leave_fence(slot)

    def _leave_fence(self, slot: int, *, read: bool = False) -> None:
        """Let nothing be unmapped, and no request whose rows are read go on, before this work is done."""
        with self._state.gate.lock:
            fence = self._state.fence_behind(slot)
            self._state.slots.set_fence(slot, fence)
            if read and self._state.slots.is_active(slot):
                self._state.slots.reads[slot] = fence
