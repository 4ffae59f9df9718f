"""`Swapper`: a request leaves its slot for host memory, and comes back into a slot that is free.

After a swap out, the slot is idle behind the copy's fence, like the slot of a request that ended. After the copy, its
pages go where they are needed; shared ones stay with the other requests. A swap in maps pages as `step` does, and the
request shares none. `SlicedKVCache.swap_out` and `swap_in` say what callers may rely on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ..errors import ConfigError, DriverError, OutOfPagesError, StateError
from ..memory.change import Change, Growth
from ..memory.host_pool import HostPool, HostSpan
from ..paging.growth import grow_now
from ..paging.reclaim import reclaim_slot
from ..state.cache_state import CacheState
from ..unique import Unique
from .lifetime import Lifetime
from .row_mover import RowMover

__all__ = ["SwapHandle", "Swapper"]


class SwapHandle(Unique):
    """A request that was swapped out. Made by `SlicedKVCache.swap_out`.

    It holds host memory until it is swapped in, released, dropped, or its cache is closed. Thread-safe.

    Attributes
    ----------
    seq_len : int
        Tokens whose K and V it holds.
    """

    _instead = "swap_in() brings its request back, and fork() copies that"

    def __init__(self, seq_len: int, last_len: int, span: HostSpan, host: HostPool) -> None:
        self.seq_len = seq_len
        self._last_len = last_len
        self._span = span
        self._host = host
        self._used = self._unwanted = False
        self._arm()

    def _arm(self) -> None:
        self._give_back = weakref.finalize(self, self._host.give_back, self._span)
        self._give_back.atexit = False

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """*token* Keep the rows inside: a release by another thread takes effect at the end.

        Raises
        ------
        StateError
            They were given back already.
        """
        self._used = True
        try:
            if self._give_back.detach() is None:  # one step for all threads: either this or `release` finds the rows
                self._used = False
                raise StateError(f"{self!r} was swapped in or released already; it holds no rows")
            try:
                yield
            finally:
                self._arm()
                if self._unwanted:
                    self._give_back()
        finally:
            self._used = False

    def __repr__(self) -> str:
        return f"SwapHandle(seq_len={self.seq_len}, {self.num_bytes} bytes{', released' if self.released else ''})"

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory, whole pages of the OS."""
        return self._span.num_bytes

    @property
    def released(self) -> bool:
        """True when it was swapped in or released: it holds nothing any more."""
        return not (self._used or self._give_back.alive)

    def release(self) -> None:
        """Give the host memory back without bringing the request in. It never waits; a second call does nothing.

        If another thread is in `swap_in` with this handle, the release takes effect only if that fails.
        """
        self._unwanted = True
        self._give_back()


class Swapper:
    """Swap requests of one cache.

    Parameters
    ----------
    state : CacheState
    lifetime : Lifetime
    mover : RowMover
    """

    def __init__(self, state: CacheState, lifetime: Lifetime, mover: RowMover) -> None:
        self._state = state
        self._lifetime = lifetime
        self._mover = mover

    def swap_out(self, slot: int) -> SwapHandle:
        """Copy an active slot's rows out and make it idle; see `SlicedKVCache.swap_out`."""
        state = self._state
        with state.work("swap_out", slot) as tickets:
            with state.gate.lock:
                state.hold(tickets)
                state.holds.leaving.add(slot)
                seq_len, last_len = state.lengths.longest[slot], state.lengths.last(slot)
            (span,) = state.host.take([self._mover.num_bytes(seq_len)])
            handle = SwapHandle(seq_len, last_len, span, state.host)
            with ExitStack() as undo:
                undo.callback(handle.release)
                fence = self._mover.copy_out([(slot, span, seq_len)])
                undo.pop_all()
            with state.gate.lock:
                state.end(slot, fence)
                state.counters.swaps_out += 1
        return handle

    def swap_in(self, handle: SwapHandle) -> int | None:
        """Bring a request into an idle slot; see `SlicedKVCache.swap_in`."""
        if not isinstance(handle, SwapHandle) or handle._host is not self._state.host:
            raise ConfigError(f"handle is {handle!r}; it must be what swap_out of the same cache returned")
        state = self._state
        with state.work("swap_in"), handle._in_use(), ExitStack() as undo:
            pages = state.layout.pages_for(handle.seq_len)
            free_before = state.pool.free_pages
            slot = self._lifetime.begin(handle.seq_len, map_ahead=False)
            before = state.backing.mapped(slot)
            undo.callback(self._undo_swap_in, slot, before, free_before)
            with state.gate.lock:
                state.holds.add((slot,))
            try:
                self._grow(slot, pages - before)
            except OutOfPagesError:
                return None
            self._mover.copy_in([(slot, handle._span, handle.seq_len)])
            undo.pop_all()
            with state.gate.lock:
                state.lengths.start(slot, handle.seq_len, handle._last_len)
                state.counters.swaps_in += 1
                state.note_mapped(slot)
            handle.release()
        return slot

    def _grow(self, slot: int, missing: int) -> None:
        """Map what a slot lacks, without taking its own pages back for it."""
        state = self._state
        if missing <= 0:
            return
        with state.gate.lock:
            state.holds.claims[slot] = state.backing.mapped(slot) + missing
        grow_now(state, Change([Growth(slot, missing)]))

    def _undo_swap_in(self, slot: int, pages: int, free_before: int) -> None:
        """Make a slot idle again with the pages it had. What the driver will not unmap stays, as idle pages do."""
        state = self._state
        self._lifetime.undo_begin(slot)
        with state.gate.lock:
            state.holds.claims.pop(slot, None)
        if state.backing.mapped(slot) <= pages:
            return
        with suppress(DriverError, StateError):
            reclaim_slot(state, slot, wait=True, keep_pages=pages)
            state.pool.trim(free_before)
