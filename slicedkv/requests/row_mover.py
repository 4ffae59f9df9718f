"""`RowMover`: a request's rows between its slot and host memory, one copy a plane.

The rows ``[0, len)`` of a slot are one range of bytes in every plane. A host span has these ranges, plane by plane.
Copies run beside the caller's stream, after what was queued there and after the slot's earlier fence. What the caller
queues later comes after copies in, and runs beside copies out. Every method needs the gate's work token (*token*).
"""

from __future__ import annotations

from collections.abc import Iterable

from ..memory.host_pool import HostSpan
from ..state.cache_state import CacheState
from ..vmm.base import Copy, Fence
from .zeroing import Zeroer

__all__ = ["RowMover"]


class RowMover:
    """Copy rows of one cache.

    Parameters
    ----------
    state : CacheState
    zeroer : Zeroer or None
        Zeroes what the rows do not fill, with `zero_on_reuse`.
    """

    def __init__(self, state: CacheState, zeroer: Zeroer | None) -> None:
        self._state = state
        self._zeroer = zeroer
        self._driver = state.pool.driver

    def num_bytes(self, seq_len: int) -> int:
        """Bytes that `seq_len` rows take in host memory, over all planes."""
        return seq_len * self._state.layout.token_bytes

    def copy_out(self, rows: Iterable[tuple[int, HostSpan, int]]) -> Fence:
        """*token* Queue copies of rows ``[0, seq_len)`` of slots, given as ``(slot, span, seq_len)``, to their spans.

        Raises
        ------
        DriverError, StateError
            Nothing is being copied; the current stream is being captured.
        """
        rows, state = list(rows), self._state
        with state.gate.lock:
            for slot, _, _ in rows:
                if state.slots.fence(slot) is not None:  # such as of rows that were copied here on another stream
                    state.fence_behind(slot)
        return self._copy(rows, out=True)

    def copy_in(self, rows: Iterable[tuple[int, HostSpan, int]]) -> Fence:
        """*token* Queue copies of spans to their slots, which have enough pages. A fence keeps these pages mapped.

        Work queued on the current stream from now on sees the rows. Raises as `copy_out` does.
        """
        rows, state = list(rows), self._state
        if state.protector is not None:
            state.protector.settle()  # a slot may have pages that it shared before
        for slot, _, seq_len in rows:
            with state.gate.lock:  # what the copy fills need not be zeroed first
                state.clean_pages[slot] = seq_len * state.layout.row_bytes // state.layout.page_bytes
            if self._zeroer is not None:
                self._zeroer.clean(slot)
        fence = self._copy(rows, out=False)
        with state.gate.lock:
            for slot, _, _ in rows:
                state.slots.set_fence(slot, fence)
        self._driver.order_after(fence)  # when this fails, the copies run all the same
        return fence

    def _copy(self, rows: list[tuple[int, HostSpan, int]], *, out: bool) -> Fence:
        state = self._state
        copies = []
        for slot, span, seq_len in rows:
            num_bytes = seq_len * state.layout.row_bytes
            for index, plane in enumerate(state.backing.reservations if seq_len else ()):
                ends = (span.address + index * num_bytes, plane.page_address(slot, 0))
                copies.append(Copy(*(ends if out else ends[::-1]), num_bytes))
        fence = self._driver.copy_batch(copies)
        total = sum(copy.num_bytes for copy in copies)
        with state.gate.lock:
            for _, span, _ in rows:
                span.fence = fence
            if total:
                state.meter.note(fence, total)
        return fence
