"""What a cache counts about itself: `Counters` while it runs, `CacheStats` as the frozen snapshot it shows.

Knows no other module. Counters are plain attributes. Whoever changes one holds the gate's lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

__all__ = ["CacheStats", "Counters", "Reason", "StepRecord"]

Reason: TypeAlias = Literal["growth", "prefetch", "lookahead", "eager"]
"""What pages are mapped for."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What the last `step` did on the calling thread.

    Attributes
    ----------
    ok : bool
        What it returned.
    pages : int
        Pages it had to map itself, over all planes.
    stall_us : float
        Microseconds it waited for the driver or for the mapper; 0 when nothing had to be mapped.
    """

    ok: bool
    pages: int = 0
    stall_us: float = 0.0


@dataclass(slots=True)
class Counters:
    """Totals since the cache was opened; pages are counted over all planes, times are in microseconds."""

    steps: int = 0
    stalls: int = 0
    stall_us: float = 0.0
    critical_map_us: float = 0.0
    hidden_map_us: float = 0.0
    pages_growth: int = 0
    pages_lookahead: int = 0
    pages_eager: int = 0
    pages_prefetch: int = 0
    pages_reused: int = 0
    pages_reclaimed: int = 0
    pages_shared: int = 0
    pages_copied: int = 0
    extents_mapped: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    last_step: StepRecord = field(default_factory=lambda: StepRecord(ok=True))

    def count_mapped(self, reason: Reason, pages: int) -> None:
        """Add pages that were mapped, by what for."""
        match reason:
            case "growth":
                self.pages_growth += pages
            case "prefetch":
                self.pages_prefetch += pages
            case "lookahead":
                self.pages_lookahead += pages
            case "eager":
                self.pages_eager += pages

    def as_dict(self) -> dict[str, int | float | StepRecord]:
        """Values by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Snapshot of a cache. Bytes are physical and summed over all planes: a page that requests share counts once.

    Attributes
    ----------
    page_bytes, memory_limit_bytes : int
    created_bytes : int
        Behind all handles of the pool, free or mapped, by whichever of its caches.
    free_bytes : int
        Behind handles that are free in the pool.
    promised_bytes : int
        What the pool keeps for its other caches, up to their `min_share`.
    mapped_bytes : int
        Mapped by this cache: active + idle.
    active_bytes, idle_bytes : int
        Behind active slots; behind idle slots only.
    used_bytes : int
        Rows that hold tokens of active requests.
    waste_bytes : int
        Behind active slots, but holding no token: active_bytes - used_bytes.
    lookahead_bytes : int
        The part of waste_bytes in pages mapped ahead of need.
    eager_bytes : int
        The part of idle_bytes mapped for a request that is not here yet.
    shared_bytes : int
        Behind pages that more than one slot has mapped, in all caches of the pool.
    saved_bytes : int
        What active requests would hold on top if each had its own copy of what it shares.
    active_slots, idle_slots : int
    lost_slots : int
        Slots that are out of use until the cache is closed, see `LostSlotsError`.
    swapped_bytes, host_bytes : int
        Host memory that swapped-out rows fill; host memory taken for such rows, filled or not.
    copy_bytes_per_s : float
        Measured speed of copies between device and host, 0 before the first is done.
    steps : int
        Calls of `step`.
    stalls, stall_us : int, float
        Steps that waited for the driver or the mapper, and how long in all.
    critical_map_us, hidden_map_us : float
        Time in driver calls on calling threads, and on the mapper's thread.
    pages_growth, pages_lookahead, pages_eager, pages_prefetch : int
        Pages mapped, by reason.
    pages_reused : int
        Pages that new requests found mapped in their slot.
    pages_reclaimed : int
        Pages unmapped for use elsewhere.
    pages_shared : int
        Mappings that `share_prefix` and `fork` made of another request's pages.
    pages_copied : int
        Shared pages that a step replaced by a request's own copy, because the request may write there.
    extents_mapped : int
        Mappings made with one handle of several pages.
    swaps_out, swaps_in : int
        Requests that went to host memory, and that came back.
    last_step : StepRecord
    """

    page_bytes: int
    memory_limit_bytes: int
    created_bytes: int
    free_bytes: int
    promised_bytes: int
    mapped_bytes: int
    active_bytes: int
    idle_bytes: int
    used_bytes: int
    waste_bytes: int
    lookahead_bytes: int
    eager_bytes: int
    shared_bytes: int
    saved_bytes: int
    active_slots: int
    idle_slots: int
    lost_slots: int
    swapped_bytes: int
    host_bytes: int
    copy_bytes_per_s: float
    steps: int
    stalls: int
    stall_us: float
    critical_map_us: float
    hidden_map_us: float
    pages_growth: int
    pages_lookahead: int
    pages_eager: int
    pages_prefetch: int
    pages_reused: int
    pages_reclaimed: int
    pages_shared: int
    pages_copied: int
    extents_mapped: int
    swaps_out: int
    swaps_in: int
    last_step: StepRecord

    @property
    def pages_mapped(self) -> int:
        """Pages mapped since the cache was opened, for any reason."""
        return self.pages_growth + self.pages_lookahead + self.pages_eager + self.pages_prefetch
