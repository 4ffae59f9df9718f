"""`Sharer`: one page, many requests that begin alike.

Requests share the start of a slot, at the same offset in every plane. Only handles (pages or extents) that the prefix
fills can be mapped twice; the rows behind the last of them are copied. `extent_pages=1` shares all whole pages. With
extents of 16 pages, up to 15 pages per plane are copied.

Requests only read shared pages. `copy_on_write` says which rows a step lets a request write, and gives it its own copy
of the pages that hold them. Each slot lets go of a page behind its own fence; with the last one the page goes back to
the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress

from ..errors import ConfigError, DriverError, OutOfPagesError, StateError
from ..memory.change import Alias, Change, Growth
from ..paging.growth import grow_now
from ..paging.mapper import Mapper
from ..paging.reclaim import reclaim_slot, require_room, wait_for
from ..state.cache_state import CacheState
from .copier import Copier
from .lifetime import Lifetime

__all__ = ["Sharer"]


class Sharer:
    """Map pages of one request behind others too.

    Parameters
    ----------
    state : CacheState
    lifetime : Lifetime
    mapper : Mapper
    copier : Copier
    """

    def __init__(self, state: CacheState, lifetime: Lifetime, mapper: Mapper, copier: Copier) -> None:
        self._state = state
        self._lifetime = lifetime
        self._mapper = mapper
        self._copier = copier

    def share(self, src: int, dst: int, num_tokens: int) -> bool:
        """See `SlicedKVCache.share_prefix`."""
        state = self._state
        if src == dst:
            raise ConfigError(f"src and dst are both reqid {src}; share with another request")
        with state.work("share_prefix", src, dst) as tickets:
            with state.gate.lock:
                state.hold(tickets)
                self._check(src, dst, num_tokens)
            try:
                self._share(src, [dst], num_tokens)
            except OutOfPagesError:
                return False
        self._mapper.run_pending()
        return True

    def fork(self, src: int, count: int) -> list[int]:
        """See `SlicedKVCache.fork`."""
        state = self._state
        with state.work("fork", src) as tickets:
            with state.gate.lock:
                state.hold(tickets)
                num_tokens = state.lengths.last(src)
                slots = self._lifetime.begin_empty(count)
                state.holds.add(slots)
            with ExitStack() as undo:
                undo.callback(self._lifetime.undo_begin, *slots)
                if num_tokens:
                    self._share(src, slots, num_tokens)
                else:
                    self._unshare(slots)
                undo.pop_all()
        self._mapper.run_pending()
        return slots

    def _unshare(self, slots: Sequence[int]) -> None:
        """*token* Unmap what the last requests in these slots shared and others still have."""
        with self._state.gate.lock:
            sharers = list(filter(self._state.backing.shared.has, slots))
        for slot in sharers:
            reclaim_slot(self._state, slot, wait=True)

    def _check(self, src: int, dst: int, num_tokens: int) -> None:
        """Refuse what cannot be shared. Lock held."""
        lengths = self._state.lengths
        if lengths.longest[dst]:
            raise StateError(
                f"reqid {dst} has {lengths.longest[dst]} tokens already; share a prefix with a request that has had no "
                "step, as alloc_reqid() returns"
            )
        if num_tokens > lengths.last(src):
            raise StateError(
                f"num_tokens is {num_tokens}, but reqid {src} has {lengths.last(src)} tokens; share at most those"
            )

    def _share(self, src: int, targets: Sequence[int], num_tokens: int) -> None:
        """*token* Map the prefix behind all targets, which are held, or behind none; raises as `grow_now` does."""
        state, layout = self._state, self._state.layout
        state.pool.driver.record_fence()  # refuses a stream that is being captured, before anything is changed
        with state.gate.lock:
            shared = state.backing.first_segments(src, layout.whole_pages(num_tokens))
            growths = [Growth(slot, layout.pages_for(num_tokens) - shared.pages) for slot in targets]
            aliases = [Alias(slot, src, shared) for slot in targets if shared.pages]
            change = Change(growths, aliases)
            # All that the targets have mapped must go. What was asked for ahead is mapped again afterwards.
            state.holds.emptied.update(targets)
            fence = state.fence_behind(src) if aliases and state.protector is not None else None
        if fence is not None:
            wait_for(state, fence, f"device work on reqid {src}, whose pages are to become read-only")
        try:
            require_room(state, change.pages * layout.num_planes)
            for slot in targets:
                while state.backing.mapped(slot):  # again, where another thread's work in the slot was waited for
                    reclaim_slot(state, slot, wait=True)
            with state.gate.lock:
                state.holds.claims.update(dict.fromkeys(targets, layout.pages_for(num_tokens)))
            grow_now(state, change)
            self._fill(src, targets, shared.pages * layout.page_bytes, num_tokens)
        finally:
            with state.gate.lock:
                self._mapper.wake()

    def _fill(self, src: int, targets: Sequence[int], first_byte: int, num_tokens: int) -> None:
        """*token* Copy what is not shared, then note what the targets have. If that fails, they have nothing."""
        state, layout = self._state, self._state.layout
        end_byte, end_page = num_tokens * layout.row_bytes, layout.pages_for(num_tokens)
        with ExitStack() as undo:
            undo.callback(self._empty, targets)
            if state.protector is not None:
                state.protector.settle()
            for slot in targets:
                self._copier.copy(src, slot, first_byte, end_byte)
                if state.config.zero_on_reuse:
                    self._copier.zero(slot, end_byte, end_page * layout.page_bytes)
            undo.pop_all()
        with state.gate.lock:
            for slot in targets:
                state.lengths.start(slot, num_tokens)
                state.clean_pages[slot] = end_page
                state.note_mapped(slot)
                state.note_shared(slot)
            state.note_shared(src)

    def _empty(self, slots: Sequence[int]) -> None:
        """*token* Unmap what was mapped for a share that failed. What the driver refuses stays, as idle pages do."""
        with self._state.gate.lock:
            self._state.holds.claims.clear()
        for slot in slots:
            with suppress(DriverError, StateError):
                reclaim_slot(self._state, slot, wait=True)
