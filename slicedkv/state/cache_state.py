"""`CacheState`: what the parts of one cache share, and the few facts that follow from several of them.

No policy lives here: `victims` decides what may be taken back, `planner` decides what is mapped ahead. Hold the gate's
lock to read or change anything, unless a docstring says otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ..config import CacheConfig
from ..errors import StateError
from ..layout import KVLayout
from ..memory.backing import Backing
from ..memory.change import Cut
from ..memory.copy_meter import CopyMeter
from ..memory.gate import Gate
from ..memory.host_pool import HostPool, HostSpan
from ..memory.page_pool import PagePool
from ..stats import CacheStats, Counters
from ..vmm.base import Fence
from .holds import Holds
from .lengths import LengthTable
from .pace import Pace
from .protection import Protector
from .slots import SlotTable

__all__ = ["CacheState", "LateEnd"]

_PAGES_A_STRANDED_ONE = 8


class LateEnd(NamedTuple):
    """A request that will be ended: its slot, the number of its slot's requests so far, and the end of its work."""

    slot: int
    generation: int
    fence: Fence


@dataclass(slots=True, weakref_slot=True, eq=False)
class CacheState:
    """The parts of one cache.

    Attributes
    ----------
    host : HostPool
        Host memory for rows that are not in a slot.
    min_share_pages : int
        Pages over all planes that no other cache of the pool may take from this one.
    wanted : dict of int to int
        By slot, the pages per plane that `alloc_reqid(seq_len)` or `prefetch` asked for.
    eager : dict of int to int
        By idle slot, the pages per plane mapped for a request that is not here yet.
    unscheduled : bool
        Slots or mappings changed since the planner last scheduled lookahead.
    clean_pages : list of int
        By slot, the pages per plane at its start that hold nothing of another request. Only with `zero_on_reuse`.
    surplus : set of int
        Active slots whose request was cut short: the mapper unmaps what lies behind its tokens.
    late_ends : deque of LateEnd
        Ends that a finalizer or a signal's handler asked for in the middle of another call.
    news : bool
        The mapper should look whether there is work.
    mapper_slots : frozenset of int or None
        While the cache's mapper holds the work token, the slots that it is mapping pages for; what is in flight (see
        `PagePool`) is then this cache's. Otherwise None.
    paused : bool
        The cache gave free memory back and maps nothing before `resume`.
    offloaded : dict of int to HostSpan
        By active slot, the rows that are in host memory until then.
    closed : bool
        The cache gave everything back.
    protector : Protector, optional
        With `debug`, if the device can make pages read-only.
    """

    config: CacheConfig
    layout: KVLayout
    pool: PagePool
    backing: Backing
    slots: SlotTable
    lengths: LengthTable
    host: HostPool
    meter: CopyMeter
    min_share_pages: int = 0
    counters: Counters = field(default_factory=Counters)
    pace: Pace = field(default_factory=Pace)
    wanted: dict[int, int] = field(default_factory=dict)
    eager: dict[int, int] = field(default_factory=dict)
    unscheduled: bool = False
    clean_pages: list[int] = field(default_factory=list)
    surplus: set[int] = field(default_factory=set)
    late_ends: deque[LateEnd] = field(default_factory=deque)
    news: bool = False
    mapper_slots: frozenset[int] | None = None
    paused: bool = False
    offloaded: dict[int, HostSpan] = field(default_factory=dict)
    closed: bool = False
    protector: Protector | None = None
    holds: Holds = field(init=False)

    def __post_init__(self) -> None:
        self.clean_pages = [0] * self.layout.max_batch_size
        self.holds = Holds(self.gate)

    @property
    def gate(self) -> Gate:
        """The lock and token of the pool."""
        return self.pool.gate

    @property
    def neighbours(self) -> list[CacheState]:
        """The other caches on the pool."""
        members = self.pool.shares.members
        return [member for member in members if isinstance(member, CacheState) and member is not self]

    def keep_pages(self, slot: int) -> int:
        """Pages per plane of a slot that its request, or the call under way, needs. What else is mapped is margin."""
        claim = self.holds.claims.get(slot, 0)
        if not self.slots.is_active(slot):
            return claim
        wanted = 0 if slot in self.holds.emptied else self.wanted.get(slot, 0)
        return max(self.layout.pages_for(self.lengths.longest[slot]), wanted, claim)

    def usable_pages(self, slot: int, pages: int) -> int:
        """Pages per plane that a request of `pages` pages, or of unknown length (0), could reuse from an idle slot.

        Normally all that are mapped. If the last extent would waste more than an eighth of the request, only those
        before it. -1, worse than an empty slot, if the slot shares pages or is still growing.
        """
        mapped = -1 if self.backing.shared.has(slot) else self.backing.mapped(slot)
        if not pages:
            return mapped
        if self.is_growing(slot):
            return -1
        begin, end = self.backing.straddled(slot, pages)
        return min(begin, mapped) if end - pages > pages // _PAGES_A_STRANDED_ONE else mapped

    def is_growing(self, slot: int) -> bool:
        """True when the mapper is mapping pages for a slot right now, and they may be extents."""
        return self.mapper_slots is not None and slot in self.mapper_slots and self.pool.extent_pages > 1

    def best_fit(self, pages: int) -> int | None:
        """Return the idle slot that suits a request of `pages` pages per plane best; see `SlotTable.best_fit`."""
        return self.slots.best_fit(max(1, pages), lambda slot: self.usable_pages(slot, pages), self.backing.mapped)

    def is_over(self, slot: int) -> bool:
        """True when the device is done with the slot's fence. Work of its active request need not be over."""
        fence = self.slots.fence(slot)
        return fence is None or self.pool.driver.fence_done(fence)

    def spare_pages(self, slot: int, claim: int = 0) -> int:
        """Pages per plane that can be unmapped: whole handles beyond `keep_pages` and beyond `claim`."""
        mapped = self.backing.mapped(slot)
        if not mapped:
            return 0
        keep = max(claim, self.keep_pages(slot))
        return self.backing.shrinkable(slot, keep) if mapped > keep else 0

    def strike(self, slot: int, keep: int = 0) -> Cut | None:
        """Take off all books what a slot can spare beyond `keep` pages per plane.

        The caller unmaps it with `Backing.unmap`; if that fails, it calls `note_mapped`.
        """
        cut = self.backing.detach(slot, max(keep, self.keep_pages(slot)))
        self.clean_pages[slot] = min(self.clean_pages[slot], self.backing.mapped(slot))
        self.eager.pop(slot, None)
        self.note_mapped(slot)
        return cut

    def lose(self, slot: int) -> None:
        """Take a slot out of use, and end its request: nobody knows what is mapped there."""
        self.slots.lose(slot)
        self._forget(slot)
        self.eager.pop(slot, None)

    def _forget(self, slot: int) -> None:
        """Drop what the books say of a slot's request, and its host memory, which it has while the cache is paused."""
        self.lengths.reset(slot)
        self.wanted.pop(slot, None)
        self.surplus.discard(slot)
        span = self.offloaded.pop(slot, None)
        if span is not None:
            self.host.give_back(span)

    # --- the end of a request ----------------------------------------------------------------------------------------

    def end(self, slot: int, fence: Fence | None) -> None:
        """Make an active slot idle behind `fence`, or behind the fence it has. Its pages stay."""
        self.slots.deactivate(slot, fence)
        self._forget(slot)
        self.unscheduled = self.news = True

    def end_or_put_off(self, slot: int, fence: Fence) -> None:
        """End a request. If a call under way holds its slot, the slot is idle only when that call is over."""
        if self.holds.has(slot):
            self.slots.set_ending(slot, fence)
        else:
            self.end(slot, fence)

    def end_later(self, slot: int) -> None:
        """Note the end of a request, on a thread that is in the middle of another call and finds books half changed.

        The lock may be held, by that other call, or not.
        """
        self.slots.require_active(slot)
        if not self.has_request(slot):
            raise StateError(f"reqid {slot} is not active; it was freed already")
        self.late_ends.append(LateEnd(slot, self.slots.generation(slot), self.fence_behind(slot)))

    def has_request(self, slot: int) -> bool:
        """True when a request has the slot and nobody has asked for its end."""
        late = ((end.slot, end.generation) for end in list(self.late_ends))
        return self.slots.has_request(slot) and (slot, self.slots.generation(slot)) not in late

    def catch_up(self, *, working: bool = False) -> None:
        """Make the ends that were put off take effect. Lock held; while the cache is paused, only with the token."""
        for _ in range(len(self.late_ends) if working or not self.paused else 0):
            slot, generation, fence = late = self.late_ends.popleft()
            if not self.slots.has_request(slot) or self.slots.generation(slot) != generation:
                continue
            earlier = self.slots.fence(slot)
            try:
                if earlier is not None and earlier is not fence and not self.pool.driver.fence_done(earlier):
                    self.pool.driver.order_after(fence)
                    fence = self.fence_behind(slot)
            except StateError:  # the current stream is being captured: another call will do
                self.late_ends.append(late)
                return
            self.end_or_put_off(slot, fence)

    def _let_go(self) -> None:
        """*token* Let go of what a call holds, and end the requests whose end it put off. Lock held."""
        self.holds.clear()
        for slot in self.slots.ending:
            self.end(slot, None)
        self.catch_up(working=True)

    def fence_behind(self, slot: int) -> Fence:
        """A fence that comes after all that is queued on the current stream and after the slot's earlier fence."""
        driver, earlier = self.pool.driver, self.slots.fence(slot)
        fence = driver.record_fence()  # first, as it refuses a stream that is being captured
        if earlier is None or driver.fence_done(earlier):
            return fence
        driver.order_after(earlier)
        return driver.record_fence()

    @contextmanager
    def work(self, purpose: str, *reqids: int, paused: bool = False) -> Iterator[Mapping[int, int]]:
        """Hold the work token for a foreground call; at its end, let go of what the call holds.

        It yields tickets of the requests. Other threads may have changed them while the call waited, so a call decides
        about them only in the same lock block where it holds them, see `hold`. With `paused` it also works while the
        cache is paused.

        Raises
        ------
        StateError
            A request is not active; the cache is closed, or paused. See also `Gate.work`. Nothing was changed.
        """
        tickets: Mapping[int, int] = {}
        if reqids:
            with self.gate.lock:
                self._require_open(paused=paused)
                tickets = self.slots.tickets(reqids)
        with self.gate.work(purpose):
            try:
                with self.gate.lock:
                    self._let_go()  # of what a call held that was interrupted
                    self._require_open(paused=paused)
                yield tickets
            finally:
                with self.gate.lock:
                    self._let_go()

    def hold(self, tickets: Mapping[int, int]) -> None:
        """*token* Keep the slots of these requests from all other calls until this one is over. Lock held.

        Who wants to use one of them waits for the token; who ends one puts the end off. `holds.add` holds more slots.

        Raises
        ------
        StateError
            A request ended since its ticket was taken.
        """
        self.slots.require_same(tickets)
        self.holds.add(tickets)

    def _require_open(self, *, paused: bool) -> None:
        if self.closed:
            raise StateError("the cache was closed by another thread")
        if not paused:
            self.require_running()

    def require_running(self) -> None:
        """Raise `StateError` while the cache is paused."""
        if self.paused:
            raise StateError("the cache is paused; call resume() first")

    def note_mapped(self, slot: int) -> None:
        """Bring the lengths in line with what is mapped for a slot."""
        if self.slots.is_active(slot):
            self.lengths.set_backed(slot, self.layout.tokens_backed(self.backing.mapped(slot)))
            self.unscheduled = True

    def note_shared(self, slot: int) -> None:
        """Bring the lengths in line with what an active slot shares."""
        if self.slots.is_active(slot):
            self.lengths.share(slot, self.layout.rows_within(self.backing.shared.end_page(slot)))

    def snapshot(self) -> CacheStats:
        """Return the statistics of this moment."""
        planes, page_bytes, shared = self.layout.num_planes, self.pool.page_bytes, self.backing.shared
        plane_page_bytes = planes * page_bytes
        active = self.slots.active
        active_pages = sum(map(self.backing.mapped, active))
        margin_pages = sum(max(0, self.backing.mapped(slot) - self.keep_pages(slot)) for slot in active)
        saved_bytes = shared.saved_pages(active) * page_bytes
        mapped_bytes = self.backing.held_pages * page_bytes
        active_bytes = active_pages * plane_page_bytes - saved_bytes
        # What is in host memory, or on its way there, has no pages here. Rows that several requests share count once.
        backed = filter(self.backing.mapped, active)
        rows = {slot: self.lengths.longest[slot] * self.layout.row_bytes for slot in backed}
        used_bytes = (sum(rows.values()) - shared.common_bytes(rows, page_bytes)) * planes
        return CacheStats(
            page_bytes=page_bytes,
            memory_limit_bytes=self.pool.memory_limit,
            created_bytes=self.pool.created_pages * page_bytes,
            free_bytes=self.pool.free_pages * page_bytes,
            mapped_bytes=mapped_bytes,
            active_bytes=active_bytes,
            idle_bytes=mapped_bytes - active_bytes,
            used_bytes=used_bytes,
            waste_bytes=active_bytes - used_bytes,
            lookahead_bytes=margin_pages * plane_page_bytes,
            promised_bytes=self.pool.shares.promised(besides=self) * page_bytes,
            eager_bytes=sum(self.eager.values()) * plane_page_bytes,
            shared_bytes=self.pool.references.shared_pages * page_bytes,
            saved_bytes=saved_bytes,
            active_slots=len(active) - len(self.slots.ending),
            idle_slots=len(self.slots.idle) + len(self.slots.ending),
            lost_slots=len(self.slots.lost),
            swapped_bytes=self.host.used_bytes,
            host_bytes=self.host.created_bytes,
            copy_bytes_per_s=self.meter.bytes_per_s,
            **self.counters.as_dict(),  # type: ignore[arg-type]
        )

    def check_integrity(self) -> None:
        """Compare all books with each other; no driver work may be under way.

        Raises
        ------
        StateError
            An invariant is broken.
        """
        self.backing.check_integrity()
        self.pool.check_integrity()
        self.host.check_integrity()
        if self.protector is not None:
            self.protector.check_integrity()
        if not self.slots.active.issuperset(self.offloaded):
            raise StateError(f"slots {sorted(self.offloaded)} are in host memory, but not all of them are active")
        for slot in range(self.layout.max_batch_size):
            backed = self.lengths.backed[slot]
            mapped = self.backing.mapped(slot)
            if self.slots.is_active(slot):
                longest = self.lengths.longest[slot]
                short = longest > backed and slot not in self.offloaded
                if backed != self.layout.tokens_backed(mapped) or short:
                    raise StateError(
                        f"slot {slot}: {longest} tokens in use and {backed} counted as mapped, but {mapped} pages back "
                        f"{self.layout.tokens_backed(mapped)}"
                    )
                if self.lengths.shared[slot] < self.layout.rows_within(self.backing.shared.end_page(slot)):
                    raise StateError(f"slot {slot}: rows in shared pages are not known as such")
                kept = mapped - self.spare_pages(slot)  # whole handles, whose ends a request that was cut short has too
                if self.backing.shared.end_page(slot) > kept and slot not in self.surplus:
                    raise StateError(f"slot {slot} shares pages beyond its {longest} tokens")
            elif backed or self.lengths.knows(slot):
                raise StateError(f"slot {slot} is idle but has lengths")
            elif slot in self.wanted or slot in self.surplus:
                raise StateError(f"slot {slot} is idle, but pages of its last request are asked for or given up")
