"""`CopyOnWrite`: which pages a step lets a request write, and its own copy of those that it shares.

A step tells lengths only. A step of a request from its last length to a new one lets it write from the shorter of the
two up to the new length, and the guard rows behind. It may only read the rows before. So each page that holds a part of
the rows it may write must be its own.

To overwrite tokens, a request first makes a step to the length that it keeps, then one to its new length. The length
that `share_prefix` or `fork` gives counts as that of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from ..errors import LostSlotsError, StateError
from ..memory.change import Change, Growth, Swap
from ..paging.reclaim import reclaim_slot, require_room, wait_for, wait_for_slot
from ..state.cache_state import CacheState
from ..state.protection import Protector, changing
from .copier import Copier

__all__ = ["Copies", "CopyOnWrite"]


class Copies(NamedTuple):
    """What a slot's own pages replace, and, for each handle of the first plane, the slot to copy from."""

    swaps: list[Swap]
    sources: dict[int, int]


class CopyOnWrite:
    """Keep requests from writing into pages that they share.

    Parameters
    ----------
    state : CacheState
    copier : Copier
    """

    def __init__(self, state: CacheState, copier: Copier) -> None:
        self._state = state
        self._copier = copier

    def swaps(self, lens: torch.Tensor, *, count_idle: bool) -> list[Swap]:
        """What must be replaced before a step to `lens`. Idle slots count as sharers or not. Lock held."""
        state = self._state
        writers = state.lengths.writers(lens)
        if not writers:
            return []
        for slot in writers:
            state.note_shared(slot)
        writes = [(slot, *self._written(slot, int(lens[slot]))) for slot in writers]
        # What a lost slot has mapped nobody reads any more.
        shared, ignored = state.backing.shared, state.slots.lost if count_idle else state.slots.lost | state.slots.idle
        return shared.swaps(writes, shared.mappings(ignored))

    def _written(self, slot: int, length: int) -> tuple[int, int]:
        """Pages, first and end, that a request may write after a step to `length`. Lock held."""
        state, layout = self._state, self._state.layout
        return layout.page_span(
            min(state.lengths.last(slot), length), min(length + layout.guard_tokens, layout.rows_per_slot)
        )

    def is_hindered(self, lens: torch.Tensor, protector: Protector) -> bool:
        """True when pages that a step lets requests write may be read-only. Lock held."""
        writers = [slot for slot in protector.slots if lens[slot] > 0]
        return any(protector.hinders(slot, *self._written(slot, int(lens[slot]))) for slot in writers)

    def require_writable(self, reqids: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Refuse rows that requests may not write now; see `SlicedKVCache.check_writable`. Lock held."""
        state, layout = self._state, self._state.layout
        state.require_running()
        ignored = state.backing.shared.mappings(state.slots.lost)
        for slot, start, end in zip(reqids, starts, ends, strict=True):
            state.slots.require_active(slot)
            rows, backed = f"rows [{start}, {end}) of reqid {slot}", state.lengths.last(slot)
            if end > backed:
                raise StateError(
                    f"{rows} may not be written: its last step was to {backed} tokens, and nothing behind them need be "
                    f"backed; call step({{{slot}: {end}}}) before"
                )
            first_page, end_page = layout.page_span(start, end)
            for _, begin, stop in state.backing.shared.spans((slot,), ignored=ignored):
                if begin < end_page and first_page < stop:
                    raise StateError(
                        f"{rows} may not be written: they lie in pages [{first_page}, {end_page}), and others have "
                        f"pages [{begin}, {stop}) too; for pages of its own step it to {start} tokens, then to {end}"
                    )

    def make_way(self, lens: torch.Tensor, growths: Sequence[Growth]) -> Copies:
        """*token* Return what a step must replace, when nothing on the device uses it any more, and hold its sources.

        Waits, for a bounded time, for the work queued on the current stream and for that of freed requests, whose slots
        let go of what they share: the last sharer need not copy.

        Raises
        ------
        OutOfPagesError
            There is not enough memory for it and for `growths`; nothing was changed.
        StateError
            The device work did not end in time, or the current stream is being captured.
        """
        state = self._state
        with state.gate.lock:
            if not self.swaps(lens, count_idle=True):
                return Copies([], {})
            swaps = self.swaps(lens, count_idle=False)
            sources = state.backing.shared.sources(swaps, state.slots.active)
            self._hold(swaps, sources)
            idle = list(filter(state.backing.shared.has, state.slots.idle))
        require_room(state, Change(growths, swaps=swaps).pages * state.layout.num_planes)
        if swaps:
            wait_for(state, state.pool.driver.record_fence(), "device work on a page that a step must copy")
        for swap in swaps:
            wait_for_slot(state, swap.cut.slot)
        for slot in idle:
            reclaim_slot(state, slot, wait=True)
        return Copies(swaps, sources)

    def _hold(self, swaps: Sequence[Swap], sources: Mapping[int, int]) -> None:
        """*token* Keep the slots that are copied from, and what is copied also where it is margin there. Lock held."""
        holds = self._state.holds
        holds.add(sources.values())
        for cut, _ in swaps:
            for handle in cut.segments.handles[:: cut.segments.planes]:
                source = sources[handle]
                holds.claims[source] = max(holds.claims.get(source, 0), cut.end_page)

    def copy(self, copies: Copies) -> None:
        """*token* Queue copies of what was replaced, from the slots that still have it mapped and are held."""
        swaps, state = copies.swaps, self._state
        if not swaps:
            return
        with state.gate.lock:
            for slot in {swap.cut.slot for swap in swaps}:
                state.note_shared(slot)
        try:
            self._copy(copies)
        except BaseException as error:
            slots = tuple(sorted({swap.cut.slot for swap in swaps}))
            with changing(state.protector), state.gate.lock:
                for slot in slots:
                    state.lose(slot)
            if not isinstance(error, Exception):
                raise
            message = f"reqids {list(slots)} have pages of their own, but not what they held ({error})"
            raise LostSlotsError(f"{message}; out of use until the cache is closed", slots) from error

    def _copy(self, copies: Copies) -> None:
        page_bytes = self._state.layout.page_bytes
        for cut, _ in copies.swaps:
            page = cut.first_page
            sources = [copies.sources[handle] for handle in cut.segments.handles[:: cut.segments.planes]]
            for source, group in groupby(zip(sources, cut.segments.sizes, strict=True), lambda pair: pair[0]):
                end = page + sum(size for _, size in group)
                self._copier.copy(source, cut.slot, page * page_bytes, end * page_bytes)
                page = end
