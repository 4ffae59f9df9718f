"""`Planner`: which work comes next off the critical path, and doing one batch of it.

The order is the paper's:

1. pages that `alloc_reqid(seq_len)` or `prefetch` asked for;
2. lookahead: the next page of slots that near the end of what is mapped;
3. parting idle slots from what others share with them;
4. unmapping what lies behind requests that were cut short;
5. eager pages, for the request that may come next;
6. handles created ahead, so that `step` need not create them;
7. pages of idle slots, when memory is short.

A batch is so small that a `step` which needs the driver waits a few milliseconds at most. `mapper` decides who runs the
work, and when. Source: vAttention, section 6.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from statistics import median_low
from typing import NamedTuple, TypeAlias

from ..layout import ceil_div
from ..memory.change import Change, Growth
from ..state.cache_state import CacheState
from ..stats import Reason
from .growth import grow_slots
from .reclaim import reclaim_slot
from .victims import idle_victims, unpromised_pages

__all__ = ["Grow", "Planner", "Reclaim", "Stock", "Work"]

_BATCH_HANDLES = 128
"""Handles in one batch: 128 at 38 us each (map and set access on an H200) keep the driver busy for 5 ms.

A step that needs the driver may have to wait that long. With smaller batches the mapper cannot keep up beside a main
thread that is busy in Python: each batch costs it two or three waits for the GIL, of 5 ms each.
"""


class Grow(NamedTuple):
    """Map pages."""

    reason: Reason
    growths: tuple[Growth, ...]


class Stock(NamedTuple):
    """Create handles of one page ahead of need."""

    handles: int


class Reclaim(NamedTuple):
    """Take pages from a slot, all but `keep_pages` per plane."""

    slot: int
    keep_pages: int = 0


Work: TypeAlias = Grow | Stock | Reclaim
"""One batch."""


class Planner:
    """Decide on background work for one cache.

    Parameters
    ----------
    state : CacheState
    """

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self._recent_prompts: deque[int] = deque(maxlen=32)
        self._background = state.config.mapper == "background"
        self._urgent_first: list[int] = []
        self._scheduled_at = -1
        fixed = state.config.lookahead_tokens
        state.lengths.distance = (2 if self._background else 0) if fixed is None else fixed

    def note_prompt(self, seq_len: int) -> None:
        """Remember a prompt length for `eager_tokens="auto"`. Lock held."""
        self._recent_prompts.append(seq_len)

    def next(self) -> Work | None:
        """Return the next batch, or None when there is nothing to do or no memory to do it. Lock held."""
        if self.state.paused:
            return None
        if self.state.unscheduled and self.state.lengths.distance:
            self._schedule()
        urgent, later = (self._prefetch, self._lookahead), (self._eager, self._stock, self._reclaim)
        for propose in (*urgent, self._unshare, self._surplus, *later):
            work = propose()
            if work is not None:
                return work
        return None

    def execute(self, work: Work) -> float:
        """*token* Do one batch and return the seconds spent in the driver."""
        started = time.perf_counter()
        self._set_slots(frozenset(growth.slot for growth in work.growths) if isinstance(work, Grow) else frozenset())
        try:
            match work:
                case Grow(reason, growths):
                    grow_slots(self.state, Change(growths), reason)
                case Stock(handles):
                    self.state.pool.stock(handles)
                case Reclaim(slot, keep_pages):
                    reclaim_slot(self.state, slot, wait=False, keep_pages=keep_pages)
        finally:
            self._set_slots(None)
        return time.perf_counter() - started

    def _set_slots(self, slots: frozenset[int] | None) -> None:
        with self.state.gate.lock:
            self.state.mapper_slots = slots

    # --- when the next page is due --------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Set the length at which each request's next page is asked for, at most once a step."""
        state, distance = self.state, self.state.config.lookahead_tokens
        if state.counters.steps == self._scheduled_at:
            return
        self._scheduled_at = state.counters.steps
        state.unscheduled = False
        lengths, layout = state.lengths, state.layout
        self._urgent_first = sorted((slot for slot in state.slots.active if lengths.longest[slot]), key=lengths.slack)
        if distance is not None:
            return  # `LengthTable.distance` is right for every slot
        slack = [lengths.slack(slot) for slot in self._urgent_first]
        distances = state.pace.distances(slack, layout.num_planes, layout.tokens_per_page)
        lengths.distance = min(distances, default=2)
        for slot, ahead in zip(self._urgent_first, distances, strict=True):
            lengths.schedule(slot, ahead)

    # --- proposals, each None when it has nothing to do ------------------------------------------------------------

    def _prefetch(self) -> Work | None:
        state = self.state
        for slot, pages in state.wanted.items():
            missing = pages - state.backing.mapped(slot)
            if missing > 0:
                work = self._growth("prefetch", [Growth(slot, missing)])
                return work or self._take_idle()
        return None

    def _lookahead(self) -> Work | None:
        state, growths = self.state, []
        for slot in filter(state.lengths.is_due, self._urgent_first):
            missing = self._pages_after(slot) - state.backing.mapped(slot)
            if missing > 0 and state.slots.is_active(slot):
                growths.append(Growth(slot, missing))
        return self._growth("lookahead", growths)

    def _pages_after(self, slot: int) -> int:
        """Pages per plane that back at least one token more than now."""
        lengths, layout = self.state.lengths, self.state.layout
        return layout.pages_for(min(max(lengths.backed[slot], lengths.longest[slot]) + 1, layout.max_seq_len))

    def _unshare(self) -> Work | None:
        """Unmap what idle slots share with others: no request can grow there, and no memory is kept by it."""
        for slot in self._idle_sharers():
            if self.state.is_over(slot):
                return Reclaim(slot)
        return None

    def _surplus(self) -> Work | None:
        """Unmap what requests that were cut short do not need any more; leave what lookahead would map again."""
        state = self.state
        for slot in list(state.surplus):
            seq_len = state.lengths.longest[slot]
            keep = state.layout.pages_for(seq_len)
            if keep and state.backing.shared.end_page(slot) <= keep:  # shared pages are no use to write into
                keep = state.layout.pages_for(min(seq_len + state.lengths.distance, state.layout.max_seq_len))
            if not state.spare_pages(slot, claim=keep):
                state.surplus.discard(slot)
            elif state.is_over(slot):
                return Reclaim(slot, keep)
        return None

    def _idle_sharers(self) -> list[int]:
        shared = self.state.backing.shared
        return list(filter(shared.has, self.state.slots.idle)) if shared.alias_pages else []

    def _eager(self) -> Work | None:
        eager = self.state.config.eager_tokens
        tokens = eager if eager != "auto" else median_low(self._recent_prompts or (0,))
        pages = self.state.layout.pages_for(tokens)
        slot = self.state.best_fit(pages) if pages else None
        if slot is not None and self.state.backing.shared.has(slot):
            return None
        missing = pages - self.state.backing.mapped(slot) if slot is not None else 0
        return self._growth("eager", [Growth(slot, missing)]) if slot is not None and missing > 0 else None

    def _stock(self) -> Work | None:
        """Create handles of one page, so that half of the requests, at least one, could grow; at most a batch."""
        planes, active = self.state.layout.num_planes, self.state.slots.num_active
        target = max(planes, min(planes * ceil_div(active, 2), _BATCH_HANDLES))
        ready = self.state.pool.free_singles
        if not self._background or not active or ready > target // 2:
            return None
        handles = min(target - ready, self.state.pool.creatable_pages)
        return Stock(handles) if handles > 0 else None

    def _reclaim(self) -> Work | None:
        return self._take_idle() if self._memory_is_low() else None

    def _memory_is_low(self) -> bool:
        pool = self.state.pool
        return pool.available_pages * pool.page_bytes < self.state.config.reclaim_watermark * pool.memory_limit

    def _take_idle(self) -> Work | None:
        """Take pages from the largest idle slot whose work is over, but not from the one that is handed out next."""
        for slot in idle_victims(self.state):
            if self.state.is_over(slot):
                return Reclaim(slot)
        return None

    def _growth(self, reason: Reason, growths: list[Growth]) -> Work | None:
        """A batch of growths, as many as memory and the size of a batch allow; the most urgent come first."""
        chosen = tuple(_within(growths, self._affordable(), self.state.pool.extent_pages, self.state.layout.num_planes))
        return Grow(reason, chosen) if chosen else None

    def _affordable(self) -> int:
        return max(0, unpromised_pages(self.state)) // self.state.layout.num_planes

    def awaits_device(self) -> bool:
        """True when idle pages should go and device work that may use them is not over yet. Lock held."""
        if self.state.paused:
            return False
        leaving = [*self._idle_sharers(), *self.state.surplus]
        if self._memory_is_low():
            leaving += idle_victims(self.state)
        return not all(map(self.state.is_over, leaving))


def _within(growths: list[Growth], affordable: int, extent_pages: int, planes: int) -> Iterator[Growth]:
    """Cut growths to what memory affords and to the handles of one batch."""
    handles_left = max(planes, _BATCH_HANDLES)
    for slot, pages in growths:
        longest = handles_left // planes
        if pages > longest and extent_pages > 1:
            longest = longest * extent_pages
        part = min(pages, affordable, longest)
        if part <= 0:
            return
        yield Growth(slot, part)
        affordable -= part
        handles = ceil_div(part, extent_pages) if part > handles_left // planes else part
        handles_left -= planes * handles
